"""The language model judge with the request and response formats, limits and errors of common servers."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fakes import PROBLEMS, ByLetter, group
from test_judge_reply import FENCE, completion
from tiny_training import train_tiny
from training_runs import rows_of

from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.judges import chat_server, judge_identity
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.judges.prompt import DEFAULT_KEYS, ReplyKeys
from poly_epo_jax.rollouts.grading import JudgeError, check_failed_fraction, cluster_ids, grade_groups
from poly_epo_jax.system import http_client
from poly_epo_jax.types import Clustering, JudgeFailure

REASONING_MODEL = {"max_tokens_key": "max_completion_tokens", "send_seed": False, "temperature": 1.0}
AUTHORS = {
    "single_message": True,
    "response_format": "json_object",
    "rationale_key": "chain_of_thought",
    "cluster_key": "cluster_id",
    "temperature": 0.0,
    "send_seed": False,
}
"""Form of the requests in the code of the paper's authors."""


def verdicts(body: dict[str, Any], keys: ReplyKeys = DEFAULT_KEYS) -> str:
    """Returns a valid reply to a request of `judged`."""
    return json.dumps({str(n): {keys.rationale: f"Macro: {n}", keys.cluster: n} for n in (1, 2)})


def error(status: int, **fields: Any) -> httpx.Response:
    return httpx.Response(status, json={"error": fields})


Reply = Callable[[dict[str, Any]], httpx.Response | bytes]


class Server:
    """A server that replies to chat completions with `reply`, and lists its model unless `models` is False.

    Attributes:
      bodies: Contents of the requests.
      seconds: Time that the judge has waited, instead of the real time.
    """

    def __init__(self, reply: Reply, models: bool = True):
        self.reply, self.models, self.bodies, self.seconds = reply, models, [], 0.0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "judge"}]}) if self.models else httpx.Response(404)
        self.bodies.append(json.loads(request.content))
        reply = self.reply(self.bodies[-1])
        return reply if isinstance(reply, httpx.Response) else httpx.Response(200, content=reply)

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    def install(reply: Reply, models: bool = True) -> Server:
        server = Server(reply, models)
        monkeypatch.setattr(http_client, "open_transport", lambda proxy: httpx.MockTransport(server))
        monkeypatch.setattr(chat_server, "time", SimpleNamespace(monotonic=lambda: 1 + server.seconds))
        monkeypatch.setattr(asyncio, "sleep", server.sleep)
        return server

    return install


def make_judge(wait_seconds: float = 600.0, model: str = "judge", **options: Any) -> LLMJudge:
    section = JudgeSection(url="http://judge", model=model, wait_seconds=wait_seconds, max_failed_fraction=0.25)
    return LLMJudge(ByLetter(), section, **options)


def judged(judge: LLMJudge) -> Clustering:
    """Returns the clustering of two responses as in a training step.

    Raises:
      JudgeError: If the judge fails.
    """

    async def main() -> Clustering:
        async def groups():
            yield group(PROBLEMS[0], "ab")

        await judge.wait_until_ready()
        await judge_identity(judge)
        graded = await grade_groups(groups(), PROBLEMS[:1], ByLetter(), judge)
        check_failed_fraction(graded, 0.25)
        assert cluster_ids(graded)[0].tolist() == [1, 2] and isinstance(graded[0].clustering, Clustering)
        return graded[0].clustering

    return asyncio.run(main())


def sglang(body: dict[str, Any]) -> bytes:
    return completion(None, reasoning_content=verdicts(body))


def vllm(body: dict[str, Any]) -> bytes:
    return completion(None, reasoning=verdicts(body), refusal=None)


def reasoning_model(body: dict[str, Any]) -> httpx.Response | bytes:
    """Rejects the parameters that the reasoning models of OpenAI reject."""
    supported = {"max_tokens": None, "seed": None, "temperature": 1.0}
    for name, value in supported.items():
        if body.get(name, value) != value:
            return error(400, message=f"Unsupported: '{name}'", param=name, code="unsupported_parameter")
    return completion(verdicts(body), refusal=None)


def authors_server(body: dict[str, Any]) -> httpx.Response | bytes:
    """Rejects the parameter `seed`, and returns the keys of the authors' prompt."""
    if body.keys() != {"model", "messages", "response_format", "temperature", "max_tokens"}:
        return httpx.Response(400, json=[{"error": {"code": 400, "message": "Unknown name"}}])
    assert body["response_format"] == {"type": "json_object"} and body["temperature"] == 0
    return completion(verdicts(body, ReplyKeys("chain_of_thought", "cluster_id")))


@pytest.mark.parametrize(
    ("reply", "options"),
    [
        (sglang, {}),
        (vllm, {}),
        (reasoning_model, REASONING_MODEL),
        (authors_server, AUTHORS),
        (lambda body: completion(f"<think>Two ideas.</think>\n{verdicts(body)}"), {"response_format": "none"}),
        (lambda body: completion(f"{FENCE}json\n{verdicts(body)}\n{FENCE}"), {"response_format": "json_object"}),
    ],
)
def test_common_servers_return_a_clustering(serve: Callable[..., Server], reply: Reply, options: dict[str, Any]):
    server, judge = serve(reply), make_judge(**options)
    assert judged(judge).rationales == ("Macro: 1", "Macro: 2")
    assert len(server.bodies) == 1 and server.seconds == 0


def test_a_gateway_without_a_list_of_models_requires_the_name_of_the_model(serve: Callable[..., Server]):
    serve(lambda body: completion(verdicts(body)), models=False)
    judged(make_judge())
    with pytest.raises(http_client.ServerError, match="GET http://judge/v1/models: it answered 404"):
        judged(make_judge(model="", wait_seconds=0.0))


@pytest.mark.parametrize(
    ("reply", "options", "sentence"),
    [
        (reasoning_model, {}, "max_tokens_key=max_completion_tokens"),
        (reasoning_model, REASONING_MODEL | {"send_seed": True}, "send_seed=False"),
        (reasoning_model, REASONING_MODEL | {"temperature": 0.0}, "judge.options.temperature"),
        (lambda body: completion(None, refusal="I cannot"), {}, "model refused to reply: 'I cannot'"),
        (lambda body: completion([{"type": "text", "text": verdicts(body)}]), {}, "content .* is a list of parts"),
        (lambda body: completion(""), {}, "reply is empty"),
        (lambda body: completion(None, "length", reasoning="Hm"), {}, "token limit before .*judge.options.max_tokens"),
        (lambda body: error(200, message="Prompt too long", code=400), {}, "refused .*status 200: .*Prompt too long"),
        (lambda body: error(200, message="Overloaded"), {}, "unavailable .*status 200: .*Overloaded"),
        (lambda body: error(429, code="insufficient_quota"), {}, "refused .*429: .*insufficient_quota"),
        (lambda body: error(200, message="No key", code=401), {}, "refused .*401; check judge.api_key_env"),
    ],
)
def test_errors_of_common_servers_end_with_their_cause(
    serve: Callable[..., Server], reply: Reply, options: dict[str, Any], sentence: str
):
    serve(reply)
    with pytest.raises(JudgeError, match=sentence):
        judged(make_judge(**options))


LIMITED = {
    "status 429": lambda: error(429, message="Slow down"),
    "error in a response with status 200": lambda: error(200, message="Slow down", code=429),
    "list of errors": lambda: httpx.Response(200, json=[{"error": {"status": "RESOURCE_EXHAUSTED"}}]),
    "type of error": lambda: error(200, type="rate_limit_error"),
    "error of a choice": lambda: httpx.Response(200, json={"choices": [{"error": {"code": 429}}]}),
}


def limited(response: Callable[[], httpx.Response], times: int, **headers: str) -> Reply:
    """Returns a server that limits the first requests."""
    left = [times]

    def reply(body: dict[str, Any]) -> httpx.Response | bytes:
        left[0] -= 1
        if left[0] < 0:
            return completion(verdicts(body))
        limit = response()
        limit.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
        return limit

    return reply


@pytest.mark.parametrize("kind", LIMITED)
def test_a_rate_limit_delays_a_request(serve: Callable[..., Server], kind: str):
    """Requests are repeated more often than `attempts` times, and each of them after the requested delay."""
    server, judge = serve(limited(LIMITED[kind], 5, retry_after="20")), make_judge(attempts=1)
    judged(judge)
    assert server.seconds == 100 and len(server.bodies) == 6
    assert judge.metrics()["judge/retries"] == 5
    server = serve(limited(LIMITED[kind], 4))
    judged(judge)
    assert server.seconds == 0.5 + 1 + 2 + 4


def test_an_overloaded_server_can_request_a_delay(serve: Callable[..., Server]):
    server = serve(limited(lambda: httpx.Response(503), 5, retry_after="20"))
    judged(make_judge(attempts=1))
    assert server.seconds == 100


@pytest.mark.parametrize(
    ("wait_seconds", "retry_after", "seconds", "sentence"),
    [
        (50.0, "20", 40, "raise judge.wait_seconds above the 20 s"),
        (50.0, "3600", 0, "raise judge.wait_seconds above the 3600 s"),
        (50.0, "", 50, r"Slow down.*raise judge.wait_seconds\."),
        (0.0, "", 0, "lower judge.max_concurrent"),
    ],
)
def test_a_rate_limit_ends_after_the_maximum_wait(
    serve: Callable[..., Server], wait_seconds: float, retry_after: str, seconds: float, sentence: str
):
    server = serve(limited(LIMITED["status 429"], 1000, **({"retry_after": retry_after} if retry_after else {})))
    with pytest.raises(JudgeError, match=f"limited .*{sentence}"):
        judged(make_judge(wait_seconds=wait_seconds))
    assert server.seconds == seconds


def test_an_invalid_reply_is_not_requested_again_without_randomness(serve: Callable[..., Server], capsys):
    server, judge = serve(lambda body: completion("no")), make_judge(**AUTHORS)
    for _ in range(2):
        assert isinstance(asyncio.run(judge.cluster(group(PROBLEMS[0], "ab"))), JudgeFailure)
    assert len(server.bodies) == 2
    (warning,) = capsys.readouterr().err.splitlines()
    assert (
        warning.startswith("Warning: The judge at http://judge: the reply is not JSON") and "temperature=0" in warning
    )
    serve(lambda body: httpx.Response(500))
    outcome = asyncio.run(judge.cluster(group(PROBLEMS[0], "ab")))
    assert isinstance(outcome, JudgeFailure) and outcome.kind == "unavailable"
    random: list[dict[str, Any]] = [{"temperature": 0.0}, {"send_seed": False}]
    for options in random:
        server = serve(lambda body: completion("no"))
        asyncio.run(make_judge(**options).cluster(group(PROBLEMS[0], "ab")))
        assert len(server.bodies) == 3


def test_a_single_message_holds_the_rubric_and_the_responses(serve: Callable[..., Server]):
    server = serve(lambda body: completion(verdicts(body)))
    judged(make_judge())
    judged(make_judge(single_message=True))
    (system, user), (single,) = (body["messages"] for body in server.bodies)
    assert single == {"role": "user", "content": f"{system['content']}\n\n{user['content']}"}


def test_the_rubric_names_the_entries_of_the_reply(serve: Callable[..., Server], tmp_path):
    server = serve(authors_server)
    judged(make_judge(**AUTHORS))
    (body,) = server.bodies
    rubric = body["messages"][0]["content"]
    assert '"chain_of_thought": "Macro: linear equation' in rubric and '"cluster_id": 100' in rubric
    assert '"rationale"' not in rubric and '"cluster"' not in rubric

    own = tmp_path / "rubric.txt"
    own.write_text('Reply {"chain_of_thought": "Why the \\"cluster\\" fits", "cluster_id": 1} for {num_responses}.')
    judged(make_judge(**AUTHORS, prompt_file=str(own)))
    expected = own.read_text().replace("{num_responses}", "2")
    assert server.bodies[1]["messages"][0]["content"].startswith(f"{expected}\n\nCode: ")
    with pytest.raises(ValueError, match="rationale_key='cluster' must differ"):
        make_judge(rationale_key="cluster")


@pytest.mark.slow
def test_a_run_trains_with_a_server_that_limits_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every second request is limited, and the server rejects one prompt of each step."""
    count = itertools.count()

    def reply(body: dict[str, Any]) -> httpx.Response | bytes:
        if next(count) % 2 == 0:
            return httpx.Response(200, json={"error": {"code": 429}}, headers={"Retry-After": "0.01"})
        if "\nq:\n" in body["messages"][1]["content"]:
            return error(400, message="Prompt too long")
        names = body["response_format"]["json_schema"]["schema"]["required"]
        return completion(json.dumps({name: {"rationale": "Macro: a", "cluster": int(name)} for name in names}))

    monkeypatch.setattr(http_client, "open_transport", lambda proxy: httpx.MockTransport(Server(reply)))
    changes = {"eval.every": 0, "judge.on_failure": "distinct"}
    train_tiny(tmp_path, judge=make_judge(), changes=changes)
    rows = rows_of(tmp_path)
    assert [(row["judge/failed_prompts"], row["judge/failed/refused"]) for row in rows] == [(1, 1), (1, 1)]
    assert all(row["judge/retries"] == 3 and row["judge/skipped_updates"] == 0 for row in rows)
