"""Tests clients with servers that return invalid tokens, weight versions, workers or clusters, or violate HTTP.

A server returns an invalid response (a `Lie`) once or permanently. After one invalid response, the client must retry.
Permanently invalid responses must produce an error message that names the server, within limits of time and memory.
Invalid responses must never be accepted.
"""

import asyncio
import contextlib
import contextvars
import io
import random
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import httpx
import numpy as np
from fakes import TINY, tiny_params
from lies import lies_about, lies_about_clusters, lies_about_draws, lies_about_http
from lying_servers import MAX_TOKENS, STOP_IDS, VOCABULARY, Lie, LyingServer, drawn
from outcome import Outcome
from responses import response

from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.judges import chat_server, llm
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.rollouts.servers import client, served_weights
from poly_epo_jax.rollouts.servers.adopted_weights import AdoptedWeights
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.content_check import ContentCheck
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.servers.weight_reference import PushedWeights, WeightReference
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync
from poly_epo_jax.rollouts.sglang import dialect as requests
from poly_epo_jax.rollouts.sglang.dialect import SGLANG
from poly_epo_jax.system import http_client
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Clustering, Group, JudgeFailure, Params, Problem, Request, Sampling

SECONDS = 0.5  # timeout of a response that never ends
LIMITS = {"vocab_size": VOCABULARY, "max_concurrent": 8, "timeout_seconds": SECONDS}
PATIENCE = 300.0  # timeout in seconds of all other responses and of an attempt. It is never reached.
MAX_MEMORY = 10**8  # bytes
PERMANENTLY = 10**9
PARAMS = tiny_params()

Try = Callable[[LyingServer, bool], Awaitable[str]]
"""Function `(server, permanent) -> fault` that uses a server. The fault is empty if the client behaved correctly."""


class Reference(WeightReference):
    """The expected values of the lying server, which answers the probe with the tokens of seed 0."""

    dtype, middle_layers = "float32", range(0)

    def __init__(self) -> None:
        pass

    def describe(self, params: Params) -> PushedWeights:
        return PushedWeights({}, np.zeros((1, 1), np.uint8))

    def logprobs(self, params: Params, prompt_ids: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        return np.array(drawn(0)[1], np.float32)


def attack(random: random.Random, folder: Path) -> Iterator[Outcome]:
    """Tries all invalid responses, once and permanently, in random order."""
    attempts = [
        (kind, path, lie, times, use)
        for kind, path, lies, use in _targets(folder)
        for lie in lies
        for times in (1, PERMANENTLY)
    ]
    while True:
        random.shuffle(attempts)
        for kind, path, lie, times, use in attempts:
            why = asyncio.run(_outcome(kind, path, lie, times, use))
            often = "once" if times == 1 else "permanently"
            yield Outcome(kind, not why, f"{path}, {often}: {lie.name}: {why}")


def _targets(folder: Path) -> Iterator[tuple[str, str, list[Lie], Try]]:
    http = list(lies_about_http())
    quick = [lie for lie in http if not lie.slow]

    async def push(server: LyingServer, permanent: bool) -> str:
        return await _push(server, permanent, folder)

    yield "generations", "/generate", [*lies_about_draws(), *http], _sample
    yield "generations", "GET /model_info", [*lies_about(("weight_version",)), *quick], _sample
    choice = ("choices", 0)
    fields = [("choices",), choice, (*choice, "finish_reason"), (*choice, "message"), (*choice, "message", "content")]
    yield "judge", "/v1/chat/completions", [*lies_about(*fields), *lies_about_clusters(), *http], _judge
    yield "judge", "/v1/models", [*lies_about(("data",), ("data", 0), ("data", 0, "id")), *quick], _judge
    yield "weights", "POST /update_weights_from_disk", [*lies_about(("success",)), *http], push
    yield "weights", "POST /pause_generation", [*lies_about(), *quick], push
    yield "weights", "POST /generate", [*lies_about(("meta_info",), ("meta_info", "weight_version")), *quick], push
    rank = ("ranks", 0)
    checksums = [("ranks",), rank, (*rank, "checksums"), (*rank, "checksums", "norm")]
    yield "weights", "POST /weights_checker", [*lies_about(*checksums), *quick], push
    yield "weights", "GET /server_info", [*lies_about(), *quick], push
    worker = ("workers", 0)
    named = [("workers",), worker, (*worker, "url"), (*worker, "id"), (*worker, "model_id")]
    yield "router", "GET /workers", [*lies_about(*named), *quick], push


@contextlib.contextmanager
def _long_limits(server: LyingServer) -> Iterator[None]:
    """Extends the time limits of requests to PATIENCE, unless the response never ends.

    Valid responses are then not late on a busy machine. Requests without a time limit remain unlimited.
    """
    is_endless = contextvars.ContextVar("is_endless", default=False)
    transport, handle = http_client._BoundedTransport, http_client._BoundedTransport.handle_async_request

    async def handle_async_request(self: http_client._BoundedTransport, request: httpx.Request) -> httpx.Response:
        is_lie = server.times > 0 and f"{request.method} {request.url.path}".endswith(server.path)
        is_endless.set(is_lie and server.lie is not None and server.lie.slow)
        return await handle(self, request)

    def timeout(seconds: float | None) -> asyncio.Timeout:
        return asyncio.timeout(seconds if seconds is None or is_endless.get() else max(seconds, PATIENCE))

    waits = SimpleNamespace(**vars(asyncio) | {"timeout": timeout})
    with (
        mock.patch.object(transport, "handle_async_request", handle_async_request),
        mock.patch.object(http_client, "asyncio", waits),
    ):
        yield


async def _outcome(kind: str, path: str, lie: Lie, times: int, use: Try) -> str:
    server = LyingServer()
    server.lie, server.path, server.times, server.is_router = lie, path, times, kind == "router"
    with contextlib.ExitStack() as stack:
        for module in (client, served_weights, chat_server, llm):
            stack.enter_context(mock.patch.object(module, "backoff_seconds", lambda attempt: 0.0))
        stack.enter_context(_long_limits(server))
        stack.enter_context(mock.patch.object(requests, "ANSWER_SECONDS", SECONDS))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        async with server.serving():
            before = _reset_peak_memory()
            try:
                async with asyncio.timeout(PATIENCE):
                    why = await use(server, times > 1)
            except TimeoutError:
                why = f"hung for {PATIENCE:.0f} s"
            except Exception as error:  # an exception that would print a traceback
                why = f"unhandled {type(error).__name__}: {error}"
            taken = _memory("VmHWM") - before
    return why or (f"used {taken / 1e6:.0f} MB" if taken > MAX_MEMORY else "")


async def _sample(server: LyingServer, permanent: bool) -> str:
    sampler = ServerSampler([server.url], AdoptedWeights(SGLANG, 1.0), STOP_IDS, **LIMITS)
    seeds = np.arange(3, 3 + np.random.default_rng().integers(1, 3), dtype=np.uint32)
    request = Request("p", np.array([3, 4, 5]), seeds, MAX_TOKENS)
    try:
        completions = [completion async for completion in sampler.sample([request], Sampling(MAX_TOKENS))]
    except ServerError as error:
        final = permanent or re.search("rejected the|changed during|identify|does not report|different", str(error))
        return _message_fault(str(error), server.url) if final else f"not retried: {error}"
    for completion in completions:
        token_ids, logprobs = drawn(int(seeds[completion.index]) >> 1)
        if completion.token_ids.tolist() != token_ids or not np.allclose(completion.logprobs, logprobs):
            return f"accepted {completion.token_ids.tolist()} with {completion.logprobs.tolist()}"
    if permanent and server.path == "/generate":
        return "accepted"
    return "" if sum(sampler.metrics().values()) or server.path != "/generate" else "not counted"


async def _judge(server: LyingServer, permanent: bool) -> str:
    judge = LLMJudge(
        PolynomialTask(),
        JudgeSection(
            url=server.url,
            model="" if server.path == "/v1/models" else "judge",
            timeout_seconds=SECONDS,
            wait_seconds=SECONDS,
            max_concurrent=2,
        ),
        max_tokens=256,
        attempts=2,
        max_response_chars=1000,
    )
    group = Group(Problem("p", "1 + 1", "2"), np.zeros(1, np.int32), (response("2"), response("two")))
    outcome = await judge.cluster(group)
    if isinstance(outcome, JudgeFailure):
        final = permanent or outcome.kind == "refused"
        return _message_fault(outcome.reason, server.url) if final else f"not retried: {outcome.reason}"
    assert isinstance(outcome, Clustering)
    if outcome.ids.tolist() != [1, 1] or (permanent and server.path != "/v1/models"):
        return f"accepted {outcome}"
    return ""


async def _push(server: LyingServer, permanent: bool, folder: Path) -> str:
    check = ContentCheck(SGLANG, Reference(), 8, VOCABULARY, STOP_IDS)
    weights = ServedWeights(DiskSync(folder, "run", TINY, "float32"), SGLANG, check, SECONDS, 1.0)
    sampler = ServerSampler([server.url], weights, STOP_IDS, **LIMITS)
    try:
        await sampler.push_weights(PARAMS, 1)
    except ServerError as error:
        return _message_fault(str(error), server.url)
    finally:
        weights.close()
    return "" if server.version == weights.name else f"accepted version {server.version} instead of {weights.name}"


def _message_fault(message: str, url: str) -> str:
    """Returns a description of the fault in an error message about a server, or an empty string."""
    if url not in message or not message.isprintable() or len(message) > 1000:
        return f"invalid error message {message!r:.2000}"
    return ""


def _memory(name: str) -> int:
    """Returns an entry of /proc/self/status in bytes."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def _reset_peak_memory() -> int:
    """Resets the peak memory of this process to its current memory, and returns it in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmHWM")
