"""Completions from SGLang servers whose weights are known to be the newest."""

import asyncio
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

import httpx
import numpy as np

from poly_epo_jax.records.timeline import waiting
from poly_epo_jax.rollouts.completion_check import completion_flaw
from poly_epo_jax.rollouts.servers.adopted_weights import AdoptedWeights
from poly_epo_jax.rollouts.servers.dialect import Answer
from poly_epo_jax.rollouts.servers.fleet import Fleet, Server
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.system.http_client import MAX_BYTES, ServerError, WrongAnswer, backoff_seconds, describe, open_client
from poly_epo_jax.types import Completion, FinishReason, Metrics, Params, Request, Sampling

MAX_ATTEMPTS = 8
"""Attempts per request; before each one except the first, failed servers are waited for."""
TOKEN_BYTES = 256
"""Bytes that a server may spend per token, on average: its id twice, its log-probability, its text."""


@dataclasses.dataclass(eq=False)
class _Draw:
    """A request's completions by index: those received so far, and what was last wrong with another."""

    place: int
    request: Request
    done: dict[int, Completion] = dataclasses.field(default_factory=dict)
    trouble: str = ""
    doubted: Server | None = None  # the server that last answered it wrongly


class SGLangSampler:
    """A client of one or more SGLang servers that serve the policy, or of routers in front of such servers.

    All generations of a batch come from the same weights. Generations from other weights, aborted generations and
    invalid generations are resampled with the same seed, invalid ones by another server if there is one. (SGLang
    respects seeds if it runs with --enable-deterministic-inference.)

    Args:
      urls: Servers and routers.
      weights: Pushes the policy's weights to the servers, or adopts the weights that they have.
      stop_ids: Tokens that end a generation.
      vocab_size: Size of the vocabulary. Answers with larger token ids are rejected.
      max_concurrent: Maximum number of generations that one server is given at once.
      timeout_seconds: Timeout in seconds for the generations of one prompt.
    """

    def __init__(
        self,
        urls: Sequence[str],
        weights: ServedWeights | AdoptedWeights,
        stop_ids: Sequence[int],
        *,
        vocab_size: int,
        max_concurrent: int,
        timeout_seconds: float,
    ):
        self.urls = [url.rstrip("/") for url in urls]
        self.stop_ids = tuple(stop_ids)
        self.vocab_size = vocab_size
        self.max_concurrent = max_concurrent
        self.timeout_seconds = timeout_seconds
        self._weights = weights
        self._running: set[asyncio.Task[None]] = set()
        self._counts = Counter[str]()

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yields the completions of each request as soon as all of them have arrived.

        Raises:
          ServerError: If no server is left, one rejects a request, or all answers to a request are invalid.
        """
        servers = await self._weights.servers(self.urls)
        fleet = Fleet(servers, self._weights.current, self.max_concurrent, self._weights.ensure_current)
        tasks = [
            asyncio.create_task(self._complete(fleet, _Draw(place, request), sampling))
            for place, request in enumerate(requests)
        ]
        batch = asyncio.create_task(_end(tasks, fleet))
        self._running.add(batch)
        batch.add_done_callback(self._running.discard)
        try:
            for task in asyncio.as_completed(tasks):
                for completion in await task:
                    yield completion
        finally:
            for task in tasks:
                task.cancel()
            await batch

    async def push_weights(self, params: Params, version: int) -> None:
        """Loads the weights into every server that answers, and verifies that it uses them, with an empty cache.

        Generations in progress finish with the weights that they started with, even on a server that restarts: the new
        weights are prepared alongside the old ones, and pushed once all of these generations are complete.

        Raises:
          ServerError: If a server does not accept the weights, or continues with others.
          OSError: If the weights cannot be written.
        """
        await self._weights.update(self.urls, params, version, self._idle)

    async def sleep(self) -> None:
        """Leaves the servers' memory to the trainer until weights are pushed, if `weights.sleeps`."""
        await self._weights.sleep(self.urls)

    def metrics(self) -> Metrics:
        """Server failures, resampled generations, and how many of those were wrong, since the last call."""
        counts, self._counts = self._counts, Counter[str]()
        return {f"rollouts/{name}": float(counts[name]) for name in ("server_failures", "resampled", "wrong_answers")}

    def close(self) -> None:
        """Frees the weights."""
        self._weights.close()

    async def _idle(self) -> None:
        """Waits until no generation is in progress."""
        with waiting():
            while self._running:
                await asyncio.wait(self._running)

    async def _complete(self, fleet: Fleet, draw: _Draw, sampling: Sampling) -> list[Completion]:
        """All completions of a request."""
        request = draw.request
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(backoff_seconds(attempt))
            missing = [index for index in range(len(request.seeds)) if index not in draw.done]
            tokens = len(missing) * (len(request.prompt_ids) + request.max_tokens)
            # A client for each request: the cost of a call in httpx grows with the number of calls of its client.
            client = open_client(self.timeout_seconds, MAX_BYTES + TOKEN_BYTES * tokens)
            async with fleet.lease(len(missing), tokens, draw.doubted) as server, client:
                # A list costs the server less than a call for each seed, but routers accept no lists.
                calls = [[index] for index in missing] if server.url in self._weights.routers else [missing]
                generate = functools.partial(self._weights.dialect.generate, client, server.url, request)
                answered = await asyncio.gather(
                    *(generate(indices, sampling, self.stop_ids) for indices in calls), return_exceptions=True
                )
                for indices, answers in zip(calls, answered, strict=True):
                    self._keep(fleet, server, draw, indices, answers)
            if len(draw.done) == len(request.seeds):
                return [draw.done[index] for index in range(len(request.seeds))]
        raise ServerError(
            f"The servers {', '.join(self.urls)} failed {MAX_ATTEMPTS} times to generate for problem "
            f"{request.problem_id}; see their logs for why they die, abort or err. The last time, {draw.trouble}."
        )

    def _keep(
        self,
        fleet: Fleet,
        server: Server,
        draw: _Draw,
        indices: Sequence[int],
        answers: Sequence[Answer | WrongAnswer] | BaseException,
    ) -> None:
        """Keeps complete generations from the current weights; the others will be resampled."""
        if isinstance(answers, WrongAnswer):
            answers = [answers] * len(indices)
        if isinstance(answers, httpx.HTTPError):
            self._fail(fleet, server, draw, describe(answers))
            return
        if isinstance(answers, BaseException):
            raise answers
        for index, answer in zip(indices, answers, strict=True):
            if isinstance(answer, WrongAnswer):
                self._refuse(server, draw, str(answer))
            elif answer.weight_version != (name := self._weights.name):
                self._counts["resampled"] += 1
                self._fail(fleet, server, draw, f"it generates from weights {answer.weight_version} instead of {name}")
            elif answer.finish_reason is None:
                self._counts["resampled"] += 1
                draw.trouble = f"{server.url} broke a generation off"
            elif flaw := self._flaw(draw.request, answer, answer.finish_reason):
                self._refuse(server, draw, flaw)
            else:
                ids, logprobs = answer.token_ids.astype(np.int32), answer.logprobs.astype(np.float32)
                version = self._weights.version
                draw.done[index] = Completion(draw.place, index, ids, logprobs, answer.finish_reason, version)

    def _flaw(self, request: Request, answer: Answer, finish_reason: FinishReason) -> str:
        limits = {"max_tokens": request.max_tokens, "stop_ids": self.stop_ids, "vocab_size": self.vocab_size}
        return completion_flaw(answer.token_ids, answer.logprobs, finish_reason, **limits)

    def _refuse(self, server: Server, draw: _Draw, why: str) -> None:
        self._counts.update(resampled=1, wrong_answers=1)
        draw.doubted, draw.trouble = server, f"{server.url} answered wrongly: {why}"
        if not server.has_erred:
            server.has_erred = True
            print(f"{draw.trouble} (problem {draw.request.problem_id}). It is asked again.", file=sys.stderr)

    def _fail(self, fleet: Fleet, server: Server, draw: _Draw, why: str) -> None:
        self._counts["server_failures"] += server.is_up
        draw.trouble = f"{server.url} failed: {why}"
        fleet.fail(server, why)


async def _end(tasks: Sequence[asyncio.Task[list[Completion]]], fleet: Fleet) -> None:
    """Returns once all requests are complete or given up, and no server is being revived for them."""
    await asyncio.gather(*tasks, return_exceptions=True)
    await fleet.close()
