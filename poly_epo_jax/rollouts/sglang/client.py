"""Completions from SGLang servers, from weights that are known to be the newest."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Mapping, Sequence

import httpx

from poly_epo_jax.http_client import ServerError, backoff_seconds, describe, open_client
from poly_epo_jax.model.partition import merge_params
from poly_epo_jax.rollouts.sglang.dialect import Answer, Dialect, Endpoint
from poly_epo_jax.rollouts.sglang.fleet import Fleet, Server
from poly_epo_jax.rollouts.sglang.requests import SGLANG
from poly_epo_jax.rollouts.sglang.router import Router, Watch
from poly_epo_jax.rollouts.sglang.served_weights import ServedWeights
from poly_epo_jax.timeline import waiting
from poly_epo_jax.types import Completion, Metrics, Params, Request, Sampling

MAX_ATTEMPTS = 8
"""At one request; before each but the first, failed servers are waited for."""


class SGLangSampler:
    """A client of one or several SGLang servers that serve the policy, or of routers in front of such.

    Generations are from weights of one version only: what a server wrote with others, or did not finish, is resampled
    with the same seed. (SGLang heeds the seeds where it runs with --enable-deterministic-inference.)

    Args:
      urls: where prompts are sent: servers, or a router, whose workers are then given the weights.
      weights: which they are given; None: none, and generations are from those that the servers have.
      stop_ids: a generation ends with any of these tokens.
      max_concurrent: generations that one URL is given at once.
      timeout_seconds: for the generations of one prompt, and for one weight update.
      wait_seconds: how long to wait for a server that does not answer, at the start or later.
      dialect: of the servers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        weights: ServedWeights | None,
        stop_ids: Sequence[int],
        *,
        max_concurrent: int,
        timeout_seconds: float,
        wait_seconds: float,
        dialect: Dialect = SGLANG,
    ):
        self.urls = [url.rstrip("/") for url in urls]
        self.stop_ids = tuple(stop_ids)
        self.max_concurrent = max_concurrent
        self.timeout_seconds = timeout_seconds
        self.wait_seconds = wait_seconds
        self._weights, self._dialect = weights, dialect
        self._adopted = ""
        self._endpoints: dict[str, Endpoint] = {}
        self._routers: dict[str, Router] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._server_failures = self._resampled = 0

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yields the completions of each request as soon as it has all of them.

        Raises:
          ServerError: no server is left, or one refuses a request.
        """
        await self._probe(self.urls)
        if self._weights is None:
            await self._adopt_weights()
        watches = await self._watch_routers()
        fleet = Fleet(self.urls, self.max_concurrent, functools.partial(self._revive, watches))
        tasks = [
            asyncio.create_task(self._complete(fleet, place, request, sampling))
            for place, request in enumerate(requests)
        ]
        batch = asyncio.create_task(_end(tasks, fleet, watches))
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

    async def push_weights(self, trainable: Params, frozen: Params, version: int) -> None:
        """Loads the weights into every server and makes sure that each generates from them, with an empty cache.

        Generations that are under way keep the weights they began with, also on a server that comes back: the new
        weights are prepared beside them, and pushed when all are complete.

        Raises:
          ServerError: a server does not take them, or goes on with others.
          OSError: they cannot be written.
        """
        if self._weights is None:
            raise ValueError("This sampler was opened to leave the servers' weights as they are; give it weights.")
        await self._weight_servers()  # one that takes no weights is refused before any are written
        await asyncio.to_thread(self._weights.prepare, merge_params(trainable, frozen), version)
        with waiting():
            while self._running:
                await asyncio.wait(self._running)
        await asyncio.to_thread(self._weights.switch, version)
        weight_servers = await self._weight_servers()
        await self._weights.push(weight_servers)
        for router in self._routers.values():
            for url in weight_servers:
                await router.put_back(url)

    def metrics(self) -> Metrics:
        """Server failures and resampled generations since the last call."""
        counts = {"rollouts/server_failures": self._server_failures, "rollouts/resampled": self._resampled}
        self._server_failures = self._resampled = 0
        return {name: float(count) for name, count in counts.items()}

    def close(self) -> None:
        for router in self._routers.values():
            router.close()
        if self._weights is not None:
            self._weights.close()

    async def _probe(self, urls: Sequence[str]) -> None:
        """Probes each URL once."""
        new = [url for url in urls if url not in self._endpoints]
        await asyncio.gather(*(self._dialect.wait_for(url, self.wait_seconds) for url in new))
        for endpoint in await asyncio.gather(*map(self._dialect.probe, new)):
            self._endpoints[endpoint.url] = endpoint
            if endpoint.is_router:
                self._routers[endpoint.url] = Router(endpoint.url, self.wait_seconds)

    async def _weight_servers(self) -> list[str]:
        """The servers that hold weights: those of `urls`, and the workers behind its routers."""
        await self._probe(self.urls)
        urls = [url for url in self.urls if url not in self._routers]
        for router in self._routers.values():
            urls += await router.workers()
        await self._probe(urls)
        for url in urls:
            if not self._endpoints[url].takes_weights:
                raise ServerError(
                    f"{url} has no /update_weights_from_disk (sglang-jax has none), so it can be evaluated but not "
                    "trained over; train over SGLang servers, or with rollouts.name=embedded."
                )
        return urls

    async def _adopt_weights(self) -> None:
        """Generates from the weights that the servers have."""
        models = await asyncio.gather(*(self._dialect.served_model(url) for url in self.urls))
        found = {url: model.weight_version for url, model in zip(self.urls, models, strict=True)}
        if len(set(found.values())) > 1:
            raise ServerError(f"The servers serve different weights, {found}; evaluate one at a time.")
        self._adopted = found[self.urls[0]]

    async def _watch_routers(self) -> dict[str, Watch]:
        """Takes workers that are not current out of their routers, now and during the batch. One host does."""
        watches = {}
        if self._weights is not None and self._weights.is_pushing:
            for url, router in self._routers.items():
                watches[url] = Watch(router, self._weights.is_current, self._restore_worker)
                await watches[url].start()
        return watches

    async def _restore_worker(self, url: str) -> None:
        assert self._weights is not None
        self._server_failures += 1
        await self._weights.ensure_current(url)

    async def _revive(self, watches: Mapping[str, Watch], url: str) -> None:
        """Returns when the server, or a worker behind the router, can be asked again and has the present weights."""
        if url in watches:
            await watches[url].look()
        if url in self._routers:
            await self._routers[url].wait_for_worker()
        elif self._weights is not None:
            await self._weights.ensure_current(url)
        else:
            await self._dialect.wait_for(url, self.wait_seconds)

    async def _complete(self, fleet: Fleet, place: int, request: Request, sampling: Sampling) -> list[Completion]:
        """All completions of the request at `place`."""
        done: dict[int, Completion] = {}
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(backoff_seconds(attempt))
            missing = [index for index in range(len(request.seeds)) if index not in done]
            tokens = len(missing) * (len(request.prompt_ids) + request.max_tokens)
            # A client for each request: what httpx takes for a call grows with the calls of its client.
            async with fleet.lease(len(missing), tokens) as server, open_client(self.timeout_seconds) as client:
                # A list costs the server less than a call for each seed, but routers take none.
                calls = [[index] for index in missing] if server.url in self._routers else [missing]
                generate = functools.partial(self._dialect.generate, client, server.url, request)
                answered = await asyncio.gather(
                    *(generate(indices, sampling, self.stop_ids) for indices in calls), return_exceptions=True
                )
                for indices, answers in zip(calls, answered, strict=True):
                    self._keep(fleet, server, place, done, indices, answers)
            if len(done) == len(request.seeds):
                return [done[index] for index in range(len(request.seeds))]
        raise ServerError(
            f"The servers {', '.join(self.urls)} failed {MAX_ATTEMPTS} times to generate for problem "
            f"{request.problem_id}; see their logs for why they die or abort."
        )

    def _keep(
        self,
        fleet: Fleet,
        server: Server,
        place: int,
        done: dict[int, Completion],
        indices: Sequence[int],
        answers: list[Answer] | BaseException,
    ) -> None:
        """Adds whole completions from the present weights to `done`; the others will be resampled."""
        if isinstance(answers, httpx.HTTPError):
            self._fail(fleet, server, describe(answers))
            return
        if isinstance(answers, BaseException):
            raise answers
        name = self._adopted if self._weights is None else self._weights.name
        for index, answer in zip(indices, answers, strict=True):
            if answer.weight_version == name and answer.finish_reason is not None:
                number = 0 if self._weights is None else self._weights.version
                done[index] = Completion(place, index, answer.token_ids, answer.logprobs, answer.finish_reason, number)
                continue
            self._resampled += 1
            if answer.weight_version != name:
                if self._weights is None:
                    raise ServerError(f"{server.url} changed weights while they were generated from; begin anew.")
                self._fail(fleet, server, f"it generates from weights {answer.weight_version} instead of {name}")

    def _fail(self, fleet: Fleet, server: Server, why: str) -> None:
        self._server_failures += server.is_up
        fleet.fail(server, why)


async def _end(tasks: Sequence[asyncio.Task[list[Completion]]], fleet: Fleet, watches: Mapping[str, Watch]) -> None:
    """Returns when all requests are complete or given up, and no server is brought back for them any more."""
    await asyncio.gather(*tasks, return_exceptions=True)
    await fleet.close()
    for watch in watches.values():
        await watch.close()
