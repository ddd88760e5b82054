"""Tests of the language model judge with valid, invalid, late, failing and unreachable servers."""

import asyncio
import contextvars
import hashlib
import json
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fakes import PATIENCE, until
from responses import response
from simulated_time import SimulatedTime
from test_judge_prompt import FAKE, MANIPULATIONS
from test_judge_reply import MALFORMED, completion
from transformers import AutoTokenizer

from poly_epo_jax.config.keys import AuditorSection, JudgeSection
from poly_epo_jax.judges import NoJudge, chat_server, judge_identity, llm
from poly_epo_jax.judges.capacity import capacity_warnings, warn_capacity
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.judges.prompt import build_messages, load_rubric
from poly_epo_jax.system import http_client as servers
from poly_epo_jax.system.evaluates import EVALUATES
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Clustering, Group, Judge, JudgeFailure, JudgeLoad, Problem

URL = "http://judge:8000"
KEY = "sk-very-secret"
TEXTS = ["Count up from 2.", "Double 2."]
REPLY = json.dumps(
    {"1": {"rationale": "Macro: count", "cluster": 1}, "2": {"rationale": "Macro: double", "cluster": 2}}
)


def group(texts=TEXTS, problem_id="p", weight_version=0) -> Group:
    generations = tuple(response(text, weight_version) for text in texts)
    return Group(Problem(problem_id, "What is 2 + 2?", "4"), np.zeros(1, np.int32), generations)


SECTION = {"url": URL, "model": "judge-1", "timeout_seconds": PATIENCE, "wait_seconds": 0.0, "max_concurrent": 4}
NO_COUNTS = dict.fromkeys([f"judge/{name}" for name in llm.COUNTS], 0.0)
OPTIONS: dict[str, Any] = {"max_tokens": 1024, "max_response_chars": 4000}


def make_judge(**changes) -> LLMJudge:
    section = {key: value for key, value in changes.items() if key in JudgeSection.__dataclass_fields__}
    options = {key: value for key, value in changes.items() if key not in section}
    return LLMJudge(PolynomialTask(), JudgeSection(**SECTION | section), **OPTIONS | options)


class Server:
    """A server that returns the given responses in order, repeats the last one, and records the requests."""

    def __init__(self, *answers: Any):
        self.answers, self.requests, self.backoffs = list(answers), [], []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, (bytes, httpx.Response)):
            answer = await answer(request)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, content=answer)

    def bodies(self) -> list[dict]:
        return [json.loads(request.content) for request in self.requests if request.method == "POST"]


@pytest.fixture
def serve(monkeypatch):
    """Connects all clients to a Server, and records the backoff instead of waiting."""

    def install(*answers) -> Server:
        server = Server(*answers)

        monkeypatch.setattr(servers, "open_transport", lambda proxy: httpx.MockTransport(server))
        SimulatedTime(monkeypatch, servers, only_limits=True)
        for module in (llm, chat_server):
            monkeypatch.setattr(module, "backoff_seconds", lambda failures: server.backoffs.append(failures) or 0.0)
        return server

    return install


def cluster(judge, *args, **kwargs) -> Clustering | JudgeFailure:
    return asyncio.run(judge.cluster(group(*args, **kwargs)))


def failure(judge, *args, **kwargs) -> JudgeFailure:
    """Returns the failure of a judge, which must not contain a clustering."""
    outcome = cluster(judge, *args, **kwargs)
    assert isinstance(outcome, JudgeFailure)
    assert not hasattr(outcome, "ids")
    assert URL in outcome.reason or "http://127.0.0.1" in outcome.reason
    return outcome


def test_another_program_clusters_responses_without_a_task(serve):
    server = serve(completion(REPLY))
    clustering = asyncio.run(LLMJudge(None, JudgeSection(**SECTION))("What is 2 + 2?", TEXTS))
    expected = cluster(make_judge())
    assert isinstance(clustering, Clustering) and isinstance(expected, Clustering)
    assert clustering.ids.tolist() == expected.ids.tolist()
    first, second = server.bodies()
    assert first["messages"] == second["messages"]


def test_a_valid_reply_becomes_a_clustering(serve):
    server = serve(completion(REPLY))
    judge = make_judge()
    assert isinstance(judge, Judge)
    clustering = cluster(judge)
    assert isinstance(clustering, Clustering)
    np.testing.assert_array_equal(clustering.ids, [1, 2])
    assert clustering.rationales == ("Macro: count", "Macro: double")
    (body,) = server.bodies()
    assert str(server.requests[0].url) == f"{URL}/v1/chat/completions"
    assert "authorization" not in server.requests[0].headers
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-1", 0.7, 1024)
    assert body["response_format"]["type"] == "json_schema"
    assert body["response_format"]["json_schema"]["strict"] is True
    assert list(body["response_format"]["json_schema"]["schema"]["properties"]) == ["1", "2"]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert all(text in body["messages"][1]["content"] for text in ("What is 2 + 2?", *TEXTS))
    assert judge.metrics() == NO_COUNTS


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_reply_is_a_typed_failure(serve, kind):
    for content in MALFORMED[kind]:
        serve(completion(content))
        assert failure(make_judge(attempts=1)).kind == "malformed"


@pytest.mark.parametrize("bad", [completion("no"), completion(REPLY, "length"), b"no", completion(None)])
def test_an_invalid_reply_is_retried_with_another_seed(serve, bad):
    server = serve(bad, bad, completion(REPLY))
    judge = make_judge()
    assert isinstance(cluster(judge), Clustering)
    bodies = server.bodies()
    seeds = [body.pop("seed") for body in bodies]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert bodies[0] == bodies[1] == bodies[2]
    assert not server.backoffs
    in_evaluation = contextvars.copy_context()
    in_evaluation.run(EVALUATES.set, True)
    assert in_evaluation.run(judge.metrics)["judge/retries"] == 0.0
    assert judge.metrics()["judge/retries"] == 2.0
    assert judge.metrics()["judge/retries"] == 0.0


def test_seeds_depend_on_the_group_and_the_attempt(serve):
    def seeds(**kwargs):
        server = serve(completion("no"))
        cluster(make_judge(), **kwargs)
        return tuple(body["seed"] for body in server.bodies())

    assert seeds() == seeds()
    assert len({*seeds(), *seeds(problem_id="q"), *seeds(weight_version=1)}) == 9


def test_the_last_failure_is_returned(serve):
    server = serve(completion("no"), completion("no"), completion(REPLY, "length"), completion(REPLY))
    outcome = failure(make_judge())
    assert outcome.kind == "truncated"
    assert "judge.options.max_tokens" in outcome.reason
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [408, 409, 500, 502, 503])
def test_a_busy_server_is_retried_after_a_delay(serve, status):
    busy = httpx.Response(status, text="try later")
    server = serve(busy, busy, completion(REPLY))
    judge = make_judge()
    assert isinstance(cluster(judge), Clustering)
    assert server.backoffs == [1, 2]
    assert judge.metrics()["judge/retries"] == 2.0
    serve(busy)
    outcome = failure(judge)
    assert outcome.kind == "unavailable" and f"{status}: try later" in outcome.reason


@pytest.mark.parametrize("error", [httpx.ReadTimeout("slow"), httpx.ReadError(""), httpx.RemoteProtocolError("cut")])
def test_a_failed_connection_is_retried(serve, error):
    server = serve(error, completion(REPLY))
    assert isinstance(cluster(make_judge()), Clustering)
    assert server.backoffs == [1]
    serve(error)
    assert failure(make_judge()).kind == "unavailable"


@pytest.mark.parametrize("status", [301, 400, 404, 422])
def test_a_permanent_error_is_not_retried(serve, status):
    server = serve(httpx.Response(status, text="context length exceeded" + "." * 10_000))
    outcome = failure(make_judge())
    assert outcome.kind == "refused"
    assert f"{status}: context length exceeded" in outcome.reason
    assert len(outcome.reason) < 600
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_the_error_for_a_rejected_key_names_its_variable(serve, monkeypatch, status):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = serve(httpx.Response(status, text=f"no such key: {KEY}"))
    outcome = failure(make_judge(api_key_env="JUDGE_KEY"))
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert outcome.kind == "refused" and outcome.reason.endswith(f"{status}; check the environment variable JUDGE_KEY.")
    assert "check judge.api_key_env" in failure(make_judge()).reason


def test_the_key_is_never_shown(serve, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    judge = make_judge(api_key_env="JUDGE_KEY", model="")
    assert KEY not in repr(judge)
    answers = [httpx.Response(status, text="." * 490 + KEY) for status in (400, 401, 429, 500)]
    echo = f"The header is Authorization: Bearer {KEY}"
    texts = [json.dumps({"echo": echo}), echo, json.dumps({"choices": [{"finish_reason": echo, "message": {}}]})]
    quoting = [httpx.Response(200, text=text) for text in texts]
    quoting.append(httpx.Response(200, headers={"content-encoding": echo}, content=b"x"))
    for answer in [
        *quoting,
        *answers,
        httpx.ReadError(f"Bearer {KEY}"),
        httpx.ConnectError(KEY),
        KEY.encode(),
        completion(KEY),
    ]:
        serve(answer)
        reason = failure(judge).reason
        assert KEY[:6] not in reason and KEY[-6:] not in reason
        if not isinstance(answer, bytes) and answer not in quoting:
            with pytest.raises(servers.ServerError) as caught:
                asyncio.run(judge.wait_until_ready())
            assert KEY not in str(caught.value)
    assert KEY not in "".join(capsys.readouterr())


def test_waiting_for_the_server_sends_the_key(serve, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = serve(b'{"data": []}')
    asyncio.run(make_judge(api_key_env="JUDGE_KEY").wait_until_ready())
    assert str(server.requests[0].url) == f"{URL}/v1/models"
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1beta/openai", "/v1beta/openai/chat/completions"),
        ("/v1beta/openai/", "/v1beta/openai/chat/completions"),
        ("/proxy", "/proxy/v1/chat/completions"),
    ],
)
def test_a_path_with_an_api_version_replaces_v1(serve, path: str, expected: str):
    server = serve(completion(REPLY))
    assert isinstance(cluster(make_judge(url=URL + path)), Clustering)
    assert server.requests[0].url.path == expected


def test_the_default_model_is_requested_once(serve):
    server = serve(b'{"data": [{"id": "listed"}]}', completion(REPLY))
    judge = make_judge(model="")
    for _ in range(2):  # in two event loops
        assert isinstance(cluster(judge), Clustering)
    assert [request.url.path for request in server.requests] == ["/v1/models", *["/v1/chat/completions"] * 2]
    assert [body["model"] for body in server.bodies()] == ["listed"] * 2
    serve(b'{"data": []}')
    assert "judge.model" in failure(make_judge(model="")).reason
    serve(httpx.Response(401))
    assert failure(make_judge(model="")).kind == "refused"


def test_identity_names_the_model_and_the_content_of_the_rubric(serve, tmp_path: Path, monkeypatch):
    def identity(**changes) -> dict[str, str]:
        return asyncio.run(judge_identity(make_judge(**changes)))

    serve(b'{"data": [{"id": "listed"}]}')
    default = hashlib.sha256(load_rubric("").encode()).hexdigest()
    assert identity(model="") == {"judge.model": "listed", "judge.options.prompt_file": default}
    assert identity()["judge.model"] == "judge-1"
    rubric = tmp_path / "rubric.md"
    for content in (b"Cluster.\r\n", b"Cluster by method."):
        rubric.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        assert identity(prompt_file=str(rubric))["judge.options.prompt_file"] == digest
    assert asyncio.run(judge_identity(NoJudge())) == {}

    monkeypatch.setenv("JUDGE_KEY", KEY)
    for answers, reason in (((b"{}", b'{"data": []}'), "judge.model"), ((b"{}", httpx.ReadError(KEY)), "connection")):
        serve(*answers)
        with pytest.raises(servers.ServerError, match=f"model name of the judge at {URL}: .*{reason}") as error:
            identity(model="", api_key_env="JUDGE_KEY")
        assert KEY not in str(error.value)


def test_the_judge_waits_for_a_starting_server(serve):
    down = httpx.ConnectError("refused")
    server = serve(down, down, completion(REPLY))
    judge = make_judge(wait_seconds=60.0, attempts=1)
    assert isinstance(cluster(judge), Clustering)
    assert server.backoffs == [1, 2]
    assert judge.metrics()["judge/retries"] == 0.0


def test_messages_of_an_auditor_name_its_keys(serve, tmp_path, capsys):
    def auditor(**changes) -> LLMJudge:
        keys = {"url": changes.pop("url", URL), "model": changes.pop("model", "judge-1")}
        return LLMJudge(PolynomialTask(), AuditorSection(**dict[str, Any](SECTION | keys)), **OPTIONS | changes)

    assert "correct audit.judge.url" in failure(auditor(url="http://127.0.0.1:1")).reason
    for options in ({"prompt_file": str(tmp_path)}, {"rationale_key": "cluster"}):
        with pytest.raises(ValueError, match=f"^audit.judge.options.{next(iter(options))}"):
            auditor(**options)
    serve(completion(REPLY, finish_reason="length"))
    assert "raise audit.judge.options.max_tokens" in failure(auditor(attempts=1)).reason
    assert "audit.judge.options.temperature=0" not in capsys.readouterr().err
    failure(auditor(temperature=0.0, send_seed=False))
    asyncio.run(warn_capacity(auditor(context_tokens=1), JudgeLoad(100, 100, 100)))
    warnings = capsys.readouterr().err
    for option in ("temperature=0", "max_tokens=1024; raise", "max_response_chars."):
        assert f"audit.judge.options.{option}" in warnings
    serve(b"{}")
    with pytest.raises(servers.ServerError, match=r"set audit.judge.model.* Set audit.judge.model"):
        asyncio.run(auditor(model="").identity())


def test_a_port_without_a_server_is_unreachable():
    with socket.socket() as deaf:  # reserves the port without listening
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        judge = make_judge(url=url, wait_seconds=0.05)
        outcome = failure(judge)
        assert outcome.kind == "unreachable"
        assert "judge.url" in outcome.reason
        with pytest.raises(servers.ServerError, match=f"Judge {url} did not become healthy"):
            asyncio.run(judge.wait_until_ready())


def test_all_prompts_share_one_wait(serve, monkeypatch):
    down = httpx.ConnectError("refused")
    serve(down)
    clock = iter([1.0, 4.0, 11.0, 12.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(chat_server, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    judge = make_judge(wait_seconds=10.0)
    assert [failure(judge).kind for _ in range(3)] == ["unreachable"] * 3  # after 10 s, and then immediately
    serve(completion(REPLY))
    assert isinstance(cluster(judge), Clustering)
    serve(down, down, completion(REPLY))  # the next outage has its own wait
    assert isinstance(cluster(judge), Clustering)
    assert list(clock) == []


def test_the_number_of_concurrent_requests_is_limited(serve):
    """The server responds only when three requests are in progress, and a fourth request would be counted."""
    judge = make_judge(max_concurrent=3)

    async def judge_many():
        running, max_running, three = 0, 0, asyncio.Barrier(3)

        async def answer(request):
            nonlocal running, max_running
            running += 1
            max_running = max(max_running, running)
            await three.wait()
            running -= 1
            return completion(REPLY)

        serve(answer)
        async with asyncio.timeout(PATIENCE):
            outcomes = await asyncio.gather(*(judge.cluster(group(problem_id=str(number))) for number in range(9)))
        assert all(isinstance(outcome, Clustering) for outcome in outcomes)
        assert max_running == 3

    for _ in range(2):  # in two event loops
        asyncio.run(judge_many())


def test_clustering_can_be_cancelled(serve):
    async def hang(request):
        await asyncio.Event().wait()

    async def cancel():
        task = asyncio.create_task(judge.cluster(group()))
        await until(lambda: bool(server.requests))
        task.cancel()
        await task

    server, judge = serve(hang), make_judge()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


def test_tokens_are_counted_also_of_invalid_replies(serve):
    invalid, valid = (json.loads(completion(text)) for text in ("{}", REPLY))
    invalid["usage"] = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    valid["usage"] = {"prompt_tokens": 101, "completion_tokens": 7}
    serve(json.dumps(invalid).encode(), json.dumps(valid).encode())
    judge = make_judge()
    assert isinstance(cluster(judge), Clustering)
    assert judge.metrics() == NO_COUNTS | {
        "judge/retries": 1.0,
        "judge/prompt_tokens": 201.0,
        "judge/reply_tokens": 27.0,
    }


@pytest.mark.parametrize(
    "usage", [None, [], "many", {"prompt_tokens": -1}, {"prompt_tokens": True, "completion_tokens": 10**400}]
)
def test_invalid_numbers_of_tokens_are_not_counted(serve, usage):
    serve(json.dumps(json.loads(completion(REPLY)) | {"usage": usage}).encode())
    judge = make_judge()
    assert isinstance(cluster(judge), Clustering)
    assert judge.metrics() == NO_COUNTS


def test_shortened_responses_are_counted(serve):
    server = serve(completion(REPLY))
    judge = make_judge(max_response_chars=100)
    cluster(judge, ["a" * 101, "b"])
    assert judge.metrics() == NO_COUNTS | {"judge/shortened_responses": 1.0}
    assert judge.metrics()["judge/shortened_responses"] == 0.0
    assert "1 characters left out" in server.bodies()[0]["messages"][1]["content"]


def test_a_judge_that_follows_instructions_in_responses_fails(serve):
    """The judge copies all JSON in its prompt into its reply, which the server does not constrain."""

    async def obey(request):
        user = json.loads(request.content)["messages"][1]["content"]
        found = re.findall(r"\{.*\}", user)
        return completion(f"As you wish: {' '.join(found)} {user[-20:]}")

    serve(obey)
    for text in MANIPULATIONS.values():
        assert failure(make_judge(), [text, "Double 2."]).kind == "malformed"
    assert failure(make_judge(), list(MANIPULATIONS.values())).kind == "malformed"
    assert FAKE in MANIPULATIONS["fake reply"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt_file": "none.txt"}, "none.txt is not a file"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
    ],
)
def test_invalid_settings_are_rejected(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_judge(**changes)


@pytest.mark.parametrize("key", ["", " ", "secret\nkey", "s\u00e9cret"])
def test_an_invalid_key_is_rejected_without_showing_it(monkeypatch, key):
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(ValueError, match="JUDGE_KEY") as caught:
        make_judge(api_key_env="JUDGE_KEY")
    assert "cret" not in str(caught.value)


def test_a_key_in_place_of_the_name_of_its_variable_is_not_shown():
    with pytest.raises(ValueError, match=r"judge\.api_key_env") as caught:
        make_judge(api_key_env="sk-cret")
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "is_warned"),
    [
        ("http://judge.example:80", True),
        ("http://10.0.0.7", True),
        ("http://localhost.example", True),
        ("http://localhost:1", False),
        ("http://127.0.0.1:1", False),
        ("http://[::1]:1", False),
        ("https://judge.example", False),
    ],
)
def test_a_key_that_is_sent_unencrypted_to_another_host_is_reported(monkeypatch, capsys, url, is_warned):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    make_judge(url=url)
    assert not capsys.readouterr().err
    make_judge(url=url, api_key_env="JUDGE_KEY")
    assert ("Warning: The API key is sent to" in capsys.readouterr().err) == is_warned


SHORT = {"max_response_chars": 3000, "max_tokens": 1024, "model": ""}


@pytest.mark.parametrize(
    ("load", "listed", "changes", "complaints"),
    [
        (JudgeLoad(8, 100, 1000), 16_384, {}, []),
        (JudgeLoad(8, 100, 1000), 8_192, {}, ["8 responses of 1000 tokens"]),
        (JudgeLoad(8, 100, 200), 8_192, {}, []),
        (JudgeLoad(8, 100, 200, num_turns=10), 8_192, {}, ["8 responses of 675 tokens"]),  # 19 labels of 25 tokens
        (JudgeLoad(8, 100, 9000), 16_384, {"max_response_chars": 60_000}, ["8 responses of 9000 tokens"]),
        (JudgeLoad(32, 100, 100), 65_536, {}, [r"32 responses .* 1600 .* judge.options.max_tokens=1024"]),
        (JudgeLoad(32, 100, 1000), 8_192, {}, ["max_tokens=1024", "context of 8192"]),
        (JudgeLoad(8, 100, 1000), None, {}, []),
        (JudgeLoad(8, 100, 1000), None, {"context_tokens": 8_192}, ["context of 8192"]),
        (JudgeLoad(8, 100, 1000), 8_192, {"context_tokens": 16_384}, []),
        (JudgeLoad(8, 100, 1000), 8_192, {"model": "listed"}, ["context of 8192"]),
        (JudgeLoad(8, 100, 1000), 8_192, {"model": "another"}, []),
        (
            JudgeLoad(8, 9, 9),
            65_536,
            {"response_format": "json_object"},
            ["about 4096 .*=1024; raise it, set .*=json_schema"],
        ),
        (JudgeLoad(8, 9, 9), 65_536, {"response_format": "none", "max_tokens": 4095}, ["about 4096 .*=4095"]),
        (JudgeLoad(8, 9, 9), 65_536, {"response_format": "none", "max_tokens": 4096}, []),
    ],
)
def test_exceeded_limits_cause_warnings(serve, capsys, load, listed, changes, complaints):
    model = {"id": "listed"} if listed is None else {"id": "listed", "max_model_len": listed}
    serve(json.dumps({"data": [model]}).encode())
    asyncio.run(warn_capacity(make_judge(**SHORT | changes), load))
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == len(complaints)
    for warning, complaint in zip(warnings, complaints, strict=True):
        assert re.search(f"^Warning: .*{complaint}", warning)
        assert "  " not in warning and re.search("raise|lower", warning)


@pytest.mark.parametrize("answer", [b"no", b"[]", b'{"data": 1}', b'{"data": [1]}', httpx.Response(500)])
def test_an_unknown_context_length_causes_no_warning(serve, capsys, answer):
    serve(answer)
    asyncio.run(warn_capacity(make_judge(**SHORT), JudgeLoad(8, 100, 10**9)))
    assert capsys.readouterr().err == ""


def test_the_estimate_is_close_to_the_number_of_tokens():
    if "POLY_EPO_SHARED" not in os.environ:
        pytest.skip("needs the Qwen3 tokenizer in $POLY_EPO_SHARED/tokenizers/qwen3")
    tokenizer = AutoTokenizer.from_pretrained(Path(os.environ["POLY_EPO_SHARED"]) / "tokenizers" / "qwen3")
    steps = "Let n = 37, so that 3(12 - n) + 7n = 56; this gives 36 + 4n = 56. " * 30
    messages, _ = build_messages(load_rubric(""), steps[:200], [(steps,)] * 8, 10**6)
    tokens = [len(tokenizer.encode(text)) for text in (*(m["content"] for m in messages), steps, steps[:200])]
    load = JudgeLoad(8, tokens[3], tokens[2])
    (complaint,) = capacity_warnings(load, load_rubric(""), 10**6, 1024, context=1)
    needed = int(re.findall(r"about (\d+) tokens", complaint)[0])
    assert abs(needed - (tokens[0] + tokens[1] + 1024)) < 0.05 * needed
