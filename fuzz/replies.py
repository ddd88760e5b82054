"""Tests the parser of judge replies with mutations of valid replies.

Each mutated reply must produce either the intended clustering or a counted failure, and never another clustering.
"""

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
from poly_epo_jax.judges import chat_server
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Clustering, Group, JudgeFailure, Problem

Verdicts = dict[str, Any]
KINDS = ("unreachable", "limited", "refused", "unavailable", "truncated", "malformed")
BAD_IDS = (0, -1, 10, 99, 101, 10**30, 1.0, 1e0, "1", "one", True, None, [1], {"id": 1}, float("nan"), float("inf"))
BAD_VERDICTS = (
    1,
    "1",
    None,
    [],
    {},
    True,
    [1, 2],
    {"cluster": 1},
    {"rationale": "Macro: a"},
    {"1": {"cluster": 1}},
)
BAD_RATIONALES = ("", " ", None, 1, ["a"], {"text": "a"})
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
BAD_COMPLETIONS = (
    *(b"", b"null", b"[]", b"{}", b"\xff\xfe", b"<html>busy</html>", b'"stop"', b'{"choices": []}', b"[" * 50_000),
    *(b'{"choices": [null]}', b'{"choices": [{"finish_reason": "stop"}]}', b'{"error": {"message": "overloaded"}}'),
    b'{"choices": [{"finish_reason": "stop", "message": {"content": [{"type": "text", "text": "{}"}]}}]}',
)


def attack(rng: random.Random, folder: Path) -> Iterator[Outcome]:
    """Clusters with a judge whose server returns a mutated reply, with one mutation per attempt."""
    while True:
        for kind, mutate in MUTATIONS.items():
            verdicts = valid_verdicts(rng)
            body = mutate(verdicts, rng)
            reply = body if isinstance(body, httpx.Response) else httpx.Response(200, content=body)
            yield judged(kind, verdicts, reply)


def judged(kind: str, verdicts: Verdicts, reply: httpx.Response) -> Outcome:
    """Checks the outcome of a reply.

    Args:
      kind: Name of the mutation. Replies of kinds that begin with "valid" must not fail.
      verdicts: The reply before the mutation.
      reply: The mutated HTTP response.
    """
    shown = f"{reply.status_code} {reply.content[:300]!r} for {json.dumps(verdicts)[:300]}"
    try:
        outcome = asyncio.run(request(len(verdicts), reply))
    except Exception as error:
        return Outcome(kind, False, f"{error!r} from {shown}")
    if isinstance(outcome, JudgeFailure):
        counted = outcome.kind in KINDS and bool(outcome.reason) and not kind.startswith("valid")
        return Outcome(kind, counted, f"{outcome} from {shown}")
    expected = [verdict["cluster"] for verdict in verdicts.values()]
    return Outcome(kind, np.array_equal(outcome.ids, expected), f"clusters {outcome.ids} from {shown}")


async def request(num_responses: int, reply: httpx.Response) -> Clustering | JudgeFailure:
    """Clusters a group of `num_responses` responses with a judge whose server returns `reply`."""

    def open_client(timeout_seconds: float, proxy: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(lambda request: reply), timeout=timeout_seconds)

    judge = LLMJudge(
        PolynomialTask(),
        JudgeSection(url="http://judge", model="judge", timeout_seconds=5.0, wait_seconds=0.0, max_concurrent=1),
        max_tokens=1024,
        attempts=1,
        max_response_chars=1000,
    )
    generations = tuple(response(f"Idea {number}.") for number in range(num_responses))
    before, chat_server.open_client = chat_server.open_client, open_client
    try:
        return await judge.cluster(Group(Problem("p", "1 + 1?", "2"), np.zeros(1, np.int32), generations))
    finally:
        chat_server.open_client = before


def valid_verdicts(rng: random.Random) -> Verdicts:
    """Returns valid verdicts on 2 to 9 responses, so that cluster ids are single digits or 100."""
    size = rng.randint(2, 9)
    clusters = [rng.choice([*range(1, size + 1), 100]) for _ in range(size)]
    return {
        str(number): {"rationale": f"Macro: {rng.choice('abc')}; micro: d", "cluster": cluster}
        for number, cluster in enumerate(clusters, start=1)
    }


def completion(content: Any, finish_reason: Any = "stop", **message: Any) -> bytes:
    """Returns the body of a chat completion with this content and additional fields of the message."""
    spoken = {"role": "assistant", "content": content} | message
    return json.dumps({"choices": [{"index": 0, "finish_reason": finish_reason, "message": spoken}]}).encode()


def change_text(change: Callable[[str, random.Random], str]) -> Callable[[Verdicts, random.Random], bytes]:
    """Creates a mutation that changes the JSON text of the reply."""
    return lambda verdicts, rng: completion(change(json.dumps(verdicts), rng))


def change_verdict(change: Callable[[Verdicts, random.Random], Any]) -> Callable[[Verdicts, random.Random], bytes]:
    """Creates a mutation that changes the verdict on one response."""

    def mutate(verdicts: Verdicts, rng: random.Random) -> bytes:
        name = rng.choice(list(verdicts))
        return completion(json.dumps(verdicts | {name: change(dict(verdicts[name]), rng)}))

    return mutate


def without_one(verdicts: Verdicts, rng: random.Random) -> bytes:
    """Removes the verdict on one response."""
    removed = rng.choice(list(verdicts))
    return completion(json.dumps({name: verdict for name, verdict in verdicts.items() if name != removed}))


def with_one_more(verdicts: Verdicts, rng: random.Random) -> bytes:
    """Adds a verdict on a response that does not exist."""
    name = rng.choice(["0", "10", "100", "-1", "", "summary", "1.0", "01", " 1", "\uff11"])
    return completion(json.dumps(verdicts | {name: {"rationale": "Macro: new", "cluster": 1}}))


def renamed(verdicts: Verdicts, rng: random.Random) -> bytes:
    """Replaces the number of one response with an invalid one."""
    names = list(verdicts)
    names[rng.randrange(len(names))] = rng.choice(["0", "99", "one", "response 1", "01", "1 ", "\u0661", "\uff12"])
    return completion(json.dumps(dict(zip(names, verdicts.values(), strict=True))))


def with_duplicate(verdicts: Verdicts, rng: random.Random) -> bytes:
    """Adds a duplicate key, at the end of the reply or in a verdict."""
    text = json.dumps(verdicts)
    if rng.random() < 0.5:
        return completion(f'{text[:-1]}, "{rng.choice(list(verdicts))}": {{"rationale": "Macro: e", "cluster": 1}}}}')
    return completion(text.replace('"cluster": ', f'"cluster": {rng.randint(1, 2)}, "cluster": ', 1))


def shuffled(verdicts: Verdicts, rng: random.Random) -> bytes:
    """Changes the order of the verdicts and the indentation."""
    return completion(json.dumps(dict(rng.sample(list(verdicts.items()), len(verdicts))), indent=rng.choice([0, 2])))


def without_a_character(text: str, rng: random.Random) -> str:
    """Removes a random character."""
    position = rng.randrange(len(text))
    return text[:position] + text[position + 1 :]


def another_character(text: str, rng: random.Random) -> str:
    """Replaces a random character except a digit, because another digit would be another valid reply."""
    position = rng.choice([position for position, character in enumerate(text) if not character.isdigit()])
    return text[:position] + rng.choice('{}[]",: \\\0\n<|x') + text[position + 1 :]


def with_a_token(text: str, rng: random.Random) -> str:
    """Inserts a control token at a random position."""
    position = rng.choice([match.start() for match in re.finditer(r"\D", text)])
    return text[:position] + rng.choice(TOKENS) + text[position:]


def truncated_body(verdicts: Verdicts, rng: random.Random) -> bytes:
    """Truncates the body of the HTTP response."""
    body = completion(json.dumps(verdicts))
    return body[: rng.randrange(len(body))]


MUTATIONS: dict[str, Callable[[Verdicts, random.Random], bytes | httpx.Response]] = {
    "valid": lambda verdicts, rng: completion(json.dumps(verdicts)),
    "valid, another order": shuffled,
    "valid, as reasoning": lambda verdicts, rng: completion(
        None, **{rng.choice(["reasoning", "reasoning_content"]): json.dumps(verdicts)}
    ),
    "index missing": without_one,
    "index added": with_one_more,
    "index renamed": renamed,
    "index duplicated": with_duplicate,
    "invalid cluster": change_verdict(lambda verdict, rng: verdict | {"cluster": rng.choice(BAD_IDS)}),
    "invalid rationale": change_verdict(lambda verdict, rng: verdict | {"rationale": rng.choice(BAD_RATIONALES)}),
    "invalid verdict": change_verdict(lambda verdict, rng: rng.choice(BAD_VERDICTS)),
    "entry added": change_verdict(lambda verdict, rng: verdict | {rng.choice(["id", "clusters", ""]): 1}),
    "prose before": change_text(lambda text, rng: rng.choice(PROSE) + text),
    "prose after": change_text(
        lambda text, rng: text + rng.choice(["\n```", " Done.", "}", ",", "\n" + text, "<|im_end|>"])
    ),
    "two objects": change_text(lambda text, rng: text + rng.choice(["", "\n", ", "]) + '{"1": {}}'),
    "valid, after thinking": change_text(lambda text, rng: f"<think>\n{text}\n</think>\n{text}"),
    "valid, in a code fence": change_text(lambda text, rng: f"```{rng.choice(['', 'json', 'JSON'])}\n{text}\n```"),
    "thinking before": change_text(lambda text, rng: rng.choice(["", "Hm.\n<think>\n"]) + f"{text}\n</think>\n{text}"),
    "role token": change_text(with_a_token),
    "nested": change_text(lambda text, rng: rng.choice(['{"clusters": %s}', "[%s]", '"%s"', '{"1": %s}']) % text),
    "truncated": change_text(lambda text, rng: text[: rng.randrange(len(text))]),
    "invalid finish reason": lambda verdicts, rng: completion(
        json.dumps(verdicts), rng.choice(["length", "abort", "content_filter", "", None, 1])
    ),
    "character missing": change_text(without_a_character),
    "character replaced": change_text(another_character),
    "single quotes": change_text(lambda text, rng: text.replace('"', "'")),
    "content of another type": lambda verdicts, rng: completion(
        rng.choice([None, 7, [], {}, verdicts, [verdicts], ""])
    ),
    "body truncated": truncated_body,
    "invalid completion": lambda verdicts, rng: rng.choice(BAD_COMPLETIONS),
    "deep nesting": change_text(lambda text, rng: rng.choice(["[", '{"1": ']) * 20_000 + text),
    "long number": change_text(lambda text, rng: text.replace('"cluster": ', '"cluster": ' + "9" * 5_000, 1)),
    "status": lambda verdicts, rng: httpx.Response(
        rng.choice([301, 400, 401, 403, 404, 422, 429, 500, 502, 503]), content=completion(json.dumps(verdicts))
    ),
}
