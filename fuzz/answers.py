"""Tests the grader with rewritten reference answers, and with answers designed to hang, crash or deceive it.

A rewriting either preserves the meaning of the reference answer, and must be accepted, or changes it, and must be
rejected.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hostile_answers import HOSTILE, soups
from outcome import Outcome
from rewritten_answers import GOLDS, OTHER, SAME, is_plain, pairs

from poly_epo_jax.tasks.answers import last_boxed, visible
from poly_epo_jax.tasks.verifier import START_SECONDS, Outcome as Graded, Verifier

CPU_SECONDS = 2.0
# Each of the two comparisons reads two answers and compares them, and one worker may have to be replaced.
MAX_SECONDS = 6 * 15 * CPU_SECONDS + START_SECONDS
DATASETS = ("math500", "deepscaler_40k", "hmmt_feb_2025")


def attack(rng: random.Random, folder: Path) -> Iterator[Outcome]:
    """Alternates between 20 rewritten answers and one hostile answer."""
    verifier = Verifier(2, CPU_SECONDS)
    with ThreadPoolExecutor(2) as executor:
        try:
            rewritten, hostile = rewritten_answers(verifier, rng), hostile_answers(verifier, rng)
            while True:
                both = [executor.submit(lambda: [next(rewritten) for _ in range(20)]), executor.submit(next, hostile)]
                yield from both[0].result()
                yield both[1].result()
        finally:
            verifier.close()


def rewritten_answers(verifier: Verifier, rng: random.Random) -> Iterator[Outcome]:
    """Checks that rewritings with the same meaning are accepted, and rewritings with another meaning rejected."""
    golds = corpus()
    while True:
        gold = rng.choice(golds)
        attempts = [(kind, True, *pair) for kind, *pair in pairs([gold], SAME, rng)]
        attempts += [(kind, False, *pair) for kind, *pair in pairs([gold], OTHER, rng)]
        for kind, is_correct, gold, answer in rng.sample(attempts, min(5, len(attempts))):
            graded = grade(verifier, gold, rf"\boxed{{{answer}}}")
            held = (graded is Graded.RIGHT) is is_correct
            group = "same meaning" if is_correct else "different meaning"
            yield Outcome(group, held, f"{kind}: gold {gold!r}, answer {answer!r}: {graded}")


def hostile_answers(verifier: Verifier, rng: random.Random) -> Iterator[Outcome]:
    """Checks that each hostile answer is rejected within the time limit, and that the grader works afterwards."""
    named = rng.sample(sorted(HOSTILE.items()), len(HOSTILE))
    for name, answer in named:
        yield hostile(verifier, "hostile", name, answer)
    for soup in soups(rng):
        yield hostile(verifier, "soup", repr(soup), soup)


def hostile(verifier: Verifier, kind: str, name: str, answer: str) -> Outcome:
    """Grades a hostile answer, and then a correct answer.

    Args:
      verifier: The grader.
      kind: "hostile" for an answer from the list, "soup" for a random string.
      name: Name of the answer in the outcome.
      answer: The hostile answer.
    """
    gold = "5" if kind == "hostile" else "12345678987"
    start = time.monotonic()
    try:
        graded = grade(verifier, gold, rf"\boxed{{{answer}}}")
        after = verifier.compare("5", r"\frac{10}{2}")
    except Exception as error:
        return Outcome(kind, False, f"{name}: {error!r}")
    seconds = time.monotonic() - start
    held = graded is not Graded.RIGHT and after is Graded.RIGHT and seconds < MAX_SECONDS
    return Outcome(kind, held, f"{name}: {graded}, then {after}, after {seconds:.1f} s")


def grade(verifier: Verifier, gold: str, response: str) -> Graded:
    """Grades a response as `tasks/math.py` does."""
    answer = last_boxed(visible(response))
    return Graded.WRONG if answer is None else verifier.compare(gold, answer)


def corpus() -> list[str]:
    """Returns reference answers: GOLDS, and the plain answers of the datasets if POLY_EPO_SHARED is set."""
    shared = os.environ.get("POLY_EPO_SHARED")
    if not shared:
        return list(GOLDS)
    files = [Path(shared, "data", "math", f"{name}.jsonl") for name in DATASETS]
    rows = [json.loads(line) for file in files if file.exists() for line in file.open()]
    return [*GOLDS, *sorted({gold for gold in (str(row["answer"]) for row in rows) if is_plain(gold)})]
