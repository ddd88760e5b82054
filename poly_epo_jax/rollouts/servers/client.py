"""Samples completions from inference servers, and verifies that they were generated with the current weights."""

import asyncio
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal

import httpx
import numpy as np

from poly_epo_jax.records.timeline import waiting
from poly_epo_jax.rollouts.completion_check import completion_flaw
from poly_epo_jax.rollouts.servers.adopted_weights import AdoptedWeights
from poly_epo_jax.rollouts.servers.dialect import ServerCompletion
from poly_epo_jax.rollouts.servers.fleet import Server, ServerPool
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.system.http_client import (
    MAX_BYTES,
    InvalidResponseError,
    RequestError,
    backoff_seconds,
    describe_error,
    open_client,
)
from poly_epo_jax.types import Completion, Metrics, Params, Request, Sampling

MAX_ATTEMPTS = 8
"""Maximum number of attempts per request. Retries wait until a server is available."""
TOKEN_BYTES = 256
"""Maximum average response size in bytes per token, for its id (twice), its log-probability and its text."""


@dataclasses.dataclass(eq=False)
class _PendingRequest:
    """A request that is not complete yet.

    Attributes:
      place: Index of the request in the batch.
      request: The request.
      done: Valid completions received so far, keyed by the index of their seed.
      last_error: Description of the last error.
      last_failed_server: Server that failed or sent an invalid completion last. Other servers are preferred for the
        retry, because a server that rejects all prompts would have the fewest outstanding tokens.
    """

    place: int
    request: Request
    done: dict[int, Completion] = dataclasses.field(default_factory=dict)
    last_error: str = ""
    last_failed_server: Server | None = None


class ServerSampler:
    """A client of one or more servers that serve the policy, or of routers in front of such servers.

    All generations of a batch are sampled with the same weights, unless `rollouts.in_flight` is True. Then, generations
    in progress continue with new weights. Generations that were aborted, are invalid or were sampled with other weights
    are resampled with the same seed. Invalid generations are resampled by another server if one is available.

    Args:
      urls: Servers and routers.
      weights: Pushes the policy's weights to the servers, or adopts the weights that they have.
      stop_ids: Tokens that end a generation.
      vocab_size: Size of the vocabulary. Completions with token ids outside of it are rejected.
      max_concurrent: Maximum number of generations that run on one server at once. A request with more generations is
        sent to an idle server.
      timeout_seconds: Timeout in seconds for the generations of one prompt.
    """

    accepts_concurrent_calls: Literal[True] = True

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
        self.urls, self.stop_ids = [url.rstrip("/") for url in urls], tuple(stop_ids)
        self.vocab_size, self.max_concurrent, self.timeout_seconds = vocab_size, max_concurrent, timeout_seconds
        self._weights = weights
        self._running: set[asyncio.Task[None]] = set()
        self._counts = Counter[str]()
        self._pool: ServerPool | None = None

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yields the completions of each request as soon as all completions of this request have arrived.

        Args:
          requests: Requests to complete. Each request is sent to one server at a time.
          sampling: Sampling parameters.

        Raises:
          ServerError: If no server is available.
          RequestError: If a server rejects a request, or if a request fails MAX_ATTEMPTS times. It is raised after the
            completions of all other requests.
        """
        if self._pool is None:
            servers = await self._weights.servers(self.urls)
            # Another call may have created the pool in the meantime.
            self._pool = self._pool or ServerPool(
                servers, self._weights.current, self.max_concurrent, self._weights.ensure_current
            )
        pool = self._pool
        pool.num_batches += 1
        tasks = [
            asyncio.create_task(self._complete(pool, _PendingRequest(place, request), sampling))
            for place, request in enumerate(requests)
        ]
        batch = asyncio.create_task(self._end(tasks, pool))
        self._running.add(batch)
        batch.add_done_callback(self._running.discard)
        failure = None
        try:
            for task in asyncio.as_completed(tasks):
                try:
                    completions = await task
                except RequestError as error:
                    failure = error
                    continue
                for completion in completions:
                    yield completion
            if failure is not None:
                raise failure
        finally:
            for task in tasks:
                task.cancel()
            await batch

    async def push_weights(self, params: Params, version: int) -> None:
        """Pushes weights to all servers that respond, and verifies that they generate with these weights.

        Unless `rollouts.in_flight` is True, generations in progress finish with the weights that they started with,
        even if their server restarts: the new weights are prepared alongside the old ones, and pushed once all of these
        generations are complete.

        Args:
          params: All weights of the policy.
          version: Number of training steps that produced the weights.

        Raises:
          ServerError: If a server does not respond or does not accept the weights, or if all servers fail the
            verification.
          OSError: If the weights cannot be written.
        """
        await self._weights.update(self.urls, params, version, self._idle)

    async def sleep(self) -> None:
        """Releases the servers' memory until the next weight push, if `weights.sleeps` is True."""
        await self._weights.sleep(self.urls)

    def metrics(self) -> Metrics:
        """Returns the counters of generations and of weight updates since the last call."""
        counts, self._counts = self._counts, Counter[str]()
        return {
            f"rollouts/{name}": float(counts[name]) for name in ("server_failures", "resampled", "invalid_responses")
        } | self._weights.metrics()

    def close(self) -> None:
        """Frees the weights."""
        self._weights.close()

    async def _idle(self) -> None:
        """Waits until no generation is in progress."""
        with waiting():
            while self._running:
                await asyncio.wait(self._running)

    async def _complete(self, pool: ServerPool, pending: _PendingRequest, sampling: Sampling) -> list[Completion]:
        """Requests completions until all of them are valid, and returns them in the order of their seeds."""
        request = pending.request
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(backoff_seconds(attempt))
            missing = [index for index in range(len(request.seeds)) if index not in pending.done]
            tokens = len(missing) * (len(request.prompt_ids) + request.max_tokens)
            # A separate client per request, because the cost of an httpx call grows with the client's number of calls.
            client = open_client(self.timeout_seconds, MAX_BYTES + TOKEN_BYTES * tokens)
            async with pool.lease(len(missing), tokens, pending.last_failed_server) as server, client:
                # One call with a list of seeds is cheaper for the server, but routers do not accept lists.
                calls = [[index] for index in missing] if server.url in self._weights.routers else [missing]
                generate = functools.partial(self._weights.dialect.generate, client, server.url, request)
                answered = await asyncio.gather(
                    *(generate(indices, sampling, self.stop_ids) for indices in calls), return_exceptions=True
                )
                accepted = await self._weights.accepted(server.url)
                for indices, answers in zip(calls, answered, strict=True):
                    self._collect(pool, server, pending, indices, answers, accepted)
            if len(pending.done) == len(request.seeds):
                return [pending.done[index] for index in range(len(request.seeds))]
        raise RequestError(
            f"Failed to generate completions for problem {request.problem_id!r} on {', '.join(self.urls)} after "
            f"{MAX_ATTEMPTS} attempts; see the server logs. Last error: {pending.last_error}."
        )

    def _collect(
        self,
        pool: ServerPool,
        server: Server,
        pending: _PendingRequest,
        indices: Sequence[int],
        answers: Sequence[ServerCompletion | InvalidResponseError] | BaseException,
        accepted: Mapping[str, int],
    ) -> None:
        """Collects valid completions that were sampled with accepted weights. Other completions are resampled."""
        if isinstance(answers, InvalidResponseError):
            answers = [answers] * len(indices)
        if isinstance(answers, httpx.HTTPError):
            self._mark_failed(pool, server, pending, describe_error(answers))
            return
        if isinstance(answers, BaseException):
            raise answers
        limits = {"max_tokens": pending.request.max_tokens, "stop_ids": self.stop_ids, "vocab_size": self.vocab_size}
        for index, answer in zip(indices, answers, strict=True):
            if isinstance(answer, InvalidResponseError):
                self._reject(server, pending, str(answer))
            elif not accepted:
                self._mark_failed(pool, server, pending, "its weight update failed or was repeated")
            elif answer.weight_version not in (None, *accepted):
                self._mark_failed(
                    pool, server, pending, f"it has weights {answer.weight_version} instead of {self._weights.name}"
                )
            elif answer.finish_reason is None:
                pending.last_error = f"{server.url} aborted a generation"
            elif flaw := (
                completion_flaw(answer.token_ids, answer.logprobs, answer.finish_reason, **limits)
                or answer.weight_flaw(accepted)
            ):
                self._reject(server, pending, flaw)
            else:
                pending.done[index] = Completion(
                    pending.place,
                    index,
                    answer.token_ids.astype(np.int32),
                    answer.logprobs.astype(np.float32),
                    answer.finish_reason,
                    np.repeat(
                        np.array([accepted[span.version] for span in answer.weights], np.int32),
                        [span.end - span.start for span in answer.weights],
                    ),
                )
            self._counts["resampled"] += index not in pending.done

    def _reject(self, server: Server, pending: _PendingRequest, why: str) -> None:
        self._counts["invalid_responses"] += 1
        pending.last_failed_server, pending.last_error = server, f"{server.url} returned an invalid completion: {why}"
        if not server.reported_invalid:
            server.reported_invalid = True
            print(f"{pending.last_error} (problem {pending.request.problem_id!r}). Resampling.", file=sys.stderr)

    def _mark_failed(self, pool: ServerPool, server: Server, pending: _PendingRequest, why: str) -> None:
        self._counts["server_failures"] += server.is_up
        pending.last_failed_server, pending.last_error = server, f"{server.url} failed: {why}"
        pool.fail(server, why)

    async def _end(self, tasks: Sequence[asyncio.Task[list[Completion]]], pool: ServerPool) -> None:
        """Waits until all requests of a call are complete. Closes the pool unless concurrent calls use it."""
        await asyncio.gather(*tasks, return_exceptions=True)
        pool.num_batches -= 1
        if not pool.num_batches:
            self._pool = None
            await pool.close()
