"""Compares the grader with math-verify: python benchmarks/grading.py [FOLDER]

Prints the numbers of wrong decisions, in both directions, on each kind of the battery in tests/tasks/answer_pairs.txt,
and of drawn pairs (tests/support/drawn_answers.py) of the half that was not used to develop the grader. With a folder
that contains math500.jsonl, deepscaler_40k.jsonl and minerva_math.jsonl, also prints them for rewritten reference
answers of each dataset (tests/support/rewritten_answers.py). math-verify receives the same text.
"""

import collections
import json
import multiprocessing
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from math_verify import parse, verify

from poly_epo_jax.tasks.verifier import Outcome, Verifier

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from answer_pairs import Pair, battery
from drawn_answers import drawn_pairs
from rewritten_answers import OTHER, SAME, is_plain, pairs

DATASETS = ("math500", "deepscaler_40k", "minerva_math")
PAIRS_PER_DIRECTION = 300
DEADLINE_SECONDS = 30.0


def plain(gold: str, answer: str) -> bool:
    """Compares two answers with the default settings of math-verify."""
    return verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}"))


class PlainMathVerify:
    """math-verify in a separate process, which is replaced if a comparison exceeds `DEADLINE_SECONDS`."""

    def __init__(self):
        self._pool = multiprocessing.get_context("spawn").Pool(1)

    def __call__(self, gold: str, answer: str) -> bool:
        try:
            return self._pool.apply_async(plain, (gold, answer)).get(DEADLINE_SECONDS)
        except multiprocessing.TimeoutError:
            self._pool.terminate()
            self.__init__()
            return False


def rewritten(file: Path) -> list[Pair]:
    """Returns rewritten reference answers of a dataset, half of them with another meaning."""
    rng = random.Random(0)
    golds = sorted({str(json.loads(line)["answer"]) for line in file.open(encoding="utf-8")})
    golds = [gold for gold in golds if is_plain(gold)]
    chosen = []
    for rewritings, is_equal in ((SAME, True), (OTHER, False)):
        found = pairs(rng.sample(golds, min(len(golds), PAIRS_PER_DIRECTION)), rewritings, rng)
        sampled = rng.sample(found, min(len(found), PAIRS_PER_DIRECTION))
        chosen += [Pair(file.stem, gold, answer, is_equal) for _, gold, answer in sampled]
    return chosen


def print_table(graded: Sequence[Pair], graders: Sequence[Callable[[str, str], bool]]) -> None:
    """Prints, for each kind, the pairs and the errors of each grader in both directions."""
    errors: dict[str, list[int]] = collections.defaultdict(lambda: [0] * 6)
    for kind, gold, answer, is_equal in graded:
        errors[kind][not is_equal] += 1
        for index, accepts in enumerate(graders):
            errors[kind][2 + 2 * index + (not is_equal)] += accepts(gold, answer) is not is_equal
    print("| kind | equal | unequal | rejected equal | accepted unequal | math-verify: rejected | accepted |")
    print("|---|---|---|---|---|---|---|")
    for kind, counts in [*errors.items(), ("total", [sum(column) for column in zip(*errors.values(), strict=True)])]:
        print(f"| {kind} | " + " | ".join(map(str, counts)) + " |", flush=True)


def main() -> None:
    """Grades the battery and, with an argument, the datasets."""
    verifier = Verifier(1)
    graders = (lambda gold, answer: verifier.compare(gold, answer) is Outcome.RIGHT, PlainMathVerify())
    print_table(battery(), graders)
    print()
    print_table(list(drawn_pairs(PAIRS_PER_DIRECTION, random.Random(0), held_out=True)), graders)
    if len(sys.argv) > 1:
        print()
        print_table([pair for name in DATASETS for pair in rewritten(Path(sys.argv[1], f"{name}.jsonl"))], graders)
    verifier.close()


if __name__ == "__main__":
    main()
