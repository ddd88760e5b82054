"""Right replies to the judge's question, made wrong: each gives the clustering that was meant, or a failure."""

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from outcome import Outcome
from responses import response

from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.judges import llm
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Clustering, Group, JudgeFailure, Problem

Verdicts = dict[str, Any]
KINDS = ("unreachable", "refused", "unavailable", "truncated", "malformed")
NO_IDS = (0, -1, 10, 99, 101, 10**30, 1.0, 1e0, "1", "one", True, None, [1], {"id": 1}, float("nan"), float("inf"))
NO_VERDICTS = (1, "1", None, [], {}, True, [1, 2], {"cluster": 1}, {"rationale": "Macro: a"}, {"1": {"cluster": 1}})
NO_RATIONALES = ("", " ", None, 1, ["a"], {"text": "a"})
TOKENS = ("<|im_end|>", "<|im_start|>assistant\n", "</s>", "[INST]", "[|assistant|]", "<|endoftext|>", "</think>")
PROSE = (
    "Here it is: ",
    "```json\n",
    "Reply:\n",
    "\ufeff",
    "<think>All differ.</think>",
    "{} ",
    "[",
    "// ",
    "\\",
    "null ",
)
NO_COMPLETIONS = (
    *(b"", b"null", b"[]", b"{}", b"\xff\xfe", b"<html>busy</html>", b'"stop"', b'{"choices": []}', b"[" * 50_000),
    *(b'{"choices": [null]}', b'{"choices": [{"finish_reason": "stop"}]}', b'{"error": {"message": "overloaded"}}'),
    b'{"choices": [{"finish_reason": "stop", "message": {"content": [{"type": "text", "text": "{}"}]}}]}',
)


def attack(rng: random.Random, folder: Path) -> Iterator[Outcome]:
    """A judge whose server answers with a mutated reply, one at a time."""
    while True:
        for kind, mutate in MUTATIONS.items():
            verdicts = right_verdicts(rng)
            body = mutate(verdicts, rng)
            reply = body if isinstance(body, httpx.Response) else httpx.Response(200, content=body)
            yield judged(kind, verdicts, reply)


def judged(kind: str, verdicts: Verdicts, reply: httpx.Response) -> Outcome:
    shown = f"{reply.status_code} {reply.content[:300]!r} for {json.dumps(verdicts)[:300]}"
    try:
        outcome = asyncio.run(ask(len(verdicts), reply))
    except Exception as error:
        return Outcome(kind, False, f"{error!r} from {shown}")
    if isinstance(outcome, JudgeFailure):
        counted = outcome.kind in KINDS and bool(outcome.reason) and not kind.startswith("right")
        return Outcome(kind, counted, f"{outcome} from {shown}")
    meant = [verdict["cluster"] for verdict in verdicts.values()]
    return Outcome(kind, np.array_equal(outcome.ids, meant), f"clusters {outcome.ids} from {shown}")


async def ask(num_responses: int, reply: httpx.Response) -> Clustering | JudgeFailure:
    def open_client(timeout_seconds: float) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(lambda request: reply), timeout=timeout_seconds)

    judge = llm.LLMJudge(
        PolynomialTask(),
        JudgeSection(url="http://judge", model="judge", timeout_seconds=5.0, wait_seconds=0.0, max_concurrent=1),
        max_tokens=1024,
        attempts=1,
        max_response_chars=1000,
    )
    generations = tuple(response(f"Idea {number}.") for number in range(num_responses))
    before, llm.open_client = llm.open_client, open_client
    try:
        return await judge.cluster(Group(Problem("p", "1 + 1?", "2"), np.zeros(1, np.int32), generations))
    finally:
        llm.open_client = before


def right_verdicts(rng: random.Random) -> Verdicts:
    """Of 2 to 9 responses, so that a cluster has one digit or is 100."""
    size = rng.randint(2, 9)
    clusters = [rng.choice([*range(1, size + 1), 100]) for _ in range(size)]
    return {
        str(number): {"rationale": f"Macro: {rng.choice('abc')}; micro: d", "cluster": cluster}
        for number, cluster in enumerate(clusters, start=1)
    }


def completion(content: Any, finish_reason: Any = "stop", **message: Any) -> bytes:
    spoken = {"role": "assistant", "content": content} | message
    return json.dumps({"choices": [{"index": 0, "finish_reason": finish_reason, "message": spoken}]}).encode()


def of_text(change: Callable[[str, random.Random], str]) -> Callable[[Verdicts, random.Random], bytes]:
    return lambda verdicts, rng: completion(change(json.dumps(verdicts), rng))


def of_verdict(change: Callable[[Verdicts, random.Random], Any]) -> Callable[[Verdicts, random.Random], bytes]:
    """Another verdict in place of one."""

    def mutate(verdicts: Verdicts, rng: random.Random) -> bytes:
        name = rng.choice(list(verdicts))
        return completion(json.dumps(verdicts | {name: change(dict(verdicts[name]), rng)}))

    return mutate


def without_one(verdicts: Verdicts, rng: random.Random) -> bytes:
    left_out = rng.choice(list(verdicts))
    return completion(json.dumps({name: verdict for name, verdict in verdicts.items() if name != left_out}))


def with_one_more(verdicts: Verdicts, rng: random.Random) -> bytes:
    name = rng.choice(["0", "10", "100", "-1", "", "summary", "1.0", "01", " 1", "\uff11"])
    return completion(json.dumps(verdicts | {name: {"rationale": "Macro: new", "cluster": 1}}))


def renamed(verdicts: Verdicts, rng: random.Random) -> bytes:
    names = list(verdicts)
    names[rng.randrange(len(names))] = rng.choice(["0", "99", "one", "response 1", "01", "1 ", "\u0661", "\uff12"])
    return completion(json.dumps(dict(zip(names, verdicts.values(), strict=True))))


def twice(verdicts: Verdicts, rng: random.Random) -> bytes:
    """A key, at the end or in a verdict, that has been there before."""
    text = json.dumps(verdicts)
    if rng.random() < 0.5:
        return completion(f'{text[:-1]}, "{rng.choice(list(verdicts))}": {{"rationale": "Macro: e", "cluster": 1}}}}')
    return completion(text.replace('"cluster": ', f'"cluster": {rng.randint(1, 2)}, "cluster": ', 1))


def shuffled(verdicts: Verdicts, rng: random.Random) -> bytes:
    return completion(json.dumps(dict(rng.sample(list(verdicts.items()), len(verdicts))), indent=rng.choice([0, 2])))


def without_a_character(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text))
    return text[:place] + text[place + 1 :]


def another_character(text: str, rng: random.Random) -> str:
    """A digit that is another digit would be another right reply."""
    place = rng.choice([place for place, character in enumerate(text) if not character.isdigit()])
    return text[:place] + rng.choice('{}[]",: \\\0\n<|x') + text[place + 1 :]


def with_a_token(text: str, rng: random.Random) -> str:
    place = rng.choice([match.start() for match in re.finditer(r"\D", text)])
    return text[:place] + rng.choice(TOKENS) + text[place:]


def damaged_body(verdicts: Verdicts, rng: random.Random) -> bytes:
    body = completion(json.dumps(verdicts))
    return body[: rng.randrange(len(body))]


MUTATIONS: dict[str, Callable[[Verdicts, random.Random], bytes | httpx.Response]] = {
    "right": lambda verdicts, rng: completion(json.dumps(verdicts)),
    "right, another order": shuffled,
    "right, as reasoning": lambda verdicts, rng: completion(None, reasoning_content=json.dumps(verdicts)),
    "index missing": without_one,
    "index added": with_one_more,
    "index renamed": renamed,
    "index twice": twice,
    "cluster that is none": of_verdict(lambda verdict, rng: verdict | {"cluster": rng.choice(NO_IDS)}),
    "rationale that is none": of_verdict(lambda verdict, rng: verdict | {"rationale": rng.choice(NO_RATIONALES)}),
    "verdict that is none": of_verdict(lambda verdict, rng: rng.choice(NO_VERDICTS)),
    "entry added": of_verdict(lambda verdict, rng: verdict | {rng.choice(["id", "clusters", ""]): 1}),
    "prose before": of_text(lambda text, rng: rng.choice(PROSE) + text),
    "prose after": of_text(
        lambda text, rng: text + rng.choice(["\n```", " Done.", "}", ",", "\n" + text, "<|im_end|>"])
    ),
    "two objects": of_text(lambda text, rng: text + rng.choice(["", "\n", ", "]) + '{"1": {}}'),
    "thinking before": of_text(lambda text, rng: f"<think>\n{text}\n</think>\n{text}"),
    "role token": of_text(with_a_token),
    "nested": of_text(lambda text, rng: rng.choice(['{"clusters": %s}', "[%s]", '"%s"', '{"1": %s}']) % text),
    "truncated": of_text(lambda text, rng: text[: rng.randrange(len(text))]),
    "broken off": lambda verdicts, rng: completion(
        json.dumps(verdicts), rng.choice(["length", "abort", "content_filter", "", None, 1])
    ),
    "character missing": of_text(without_a_character),
    "character exchanged": of_text(another_character),
    "single quotes": of_text(lambda text, rng: text.replace('"', "'")),
    "content of another type": lambda verdicts, rng: completion(
        rng.choice([None, 7, [], {}, verdicts, [verdicts], ""])
    ),
    "body cut": damaged_body,
    "no completion": lambda verdicts, rng: rng.choice(NO_COMPLETIONS),
    "too deep": of_text(lambda text, rng: rng.choice(["[", '{"1": ']) * 20_000 + text),
    "endless number": of_text(lambda text, rng: text.replace('"cluster": ', '"cluster": ' + "9" * 5_000, 1)),
    "status": lambda verdicts, rng: httpx.Response(
        rng.choice([301, 400, 401, 403, 404, 422, 429, 500, 502, 503]), content=completion(json.dumps(verdicts))
    ),
}
