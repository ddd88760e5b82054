"""The policy's weights on servers: the current version, and how every server gets it."""

import asyncio
import itertools
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx

from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.servers.dialect import Dialect, Endpoint
from poly_epo_jax.rollouts.servers.weight_sync import WeightSync
from poly_epo_jax.rollouts.sglang import SGLANG, lay_down, wake
from poly_epo_jax.system.http_client import ServerError, backoff_seconds, describe, open_client
from poly_epo_jax.types import Params

MAX_ATTEMPTS = 8
"""Attempts per weight update; after a failed one, the next waits for the server to answer again."""
PROBE_TOKENS = 128
"""Length of the prompt with which a server is checked, if prompts may be that long."""
LOOK_SECONDS = 0.5  # between two checks whether another host has pushed its weights


class ServedWeights:
    """One version of the policy, under a name that no other run uses, for the servers that should have it.

    Routers are replaced by their workers: weights and prompts go to the workers directly.

    Args:
      sync: Loads the weights. If None, another host pushes them to the same servers, and this host waits until the
        servers have them. All hosts must then have finished their generations before any of them calls `update`.
      max_prompt_tokens: Maximum number of prompt tokens that the servers are ever given.
      timeout_seconds: Timeout in seconds of one weight update.
      wait_seconds: Maximum time in seconds to wait for a server that does not answer.
      dialect: The servers' dialect.
      sleeps: Whether the servers free their memory from `sleep` to the next `update`. Only SGLang supports this.

    Attributes:
      version: Number of training steps that produced the current weights.
      current: Servers that have finished loading the current weights. All others are checked, and given the weights if
        necessary, before they are given prompts.
      routers: Routers that are given prompts; always empty.
    """

    def __init__(
        self,
        sync: WeightSync | None,
        max_prompt_tokens: int,
        timeout_seconds: float,
        wait_seconds: float,
        dialect: Dialect = SGLANG,
        sleeps: bool = False,
    ):
        self.version = 0
        self.current: set[str] = set()
        self.routers: frozenset[str] = frozenset()
        self.dialect = dialect
        self.sleeps = sleeps
        self._sync = sync
        self._probe_tokens = min(PROBE_TOKENS, max_prompt_tokens)
        self._timeout_seconds = timeout_seconds
        self._wait_seconds = wait_seconds
        self._endpoints: dict[str, Endpoint] = {}
        # Two runs that update the same server by mistake notice each other by this word; all hosts use the same one.
        self._run = hosts.on_first(lambda: secrets.token_hex(4))

    @property
    def name(self) -> str:
        """Name of the current weights on the servers."""
        return f"{self._run}-{self.version}"

    async def servers(self, urls: Sequence[str]) -> list[str]:
        """Returns the servers in `urls` and the workers that its routers list, including those that do not answer.

        Raises:
          ServerError: If a router does not answer, or a server of `urls` does not accept weights.
        """
        return list(itertools.chain(*[await self._listed(url) for url in urls]))

    async def update(
        self, urls: Sequence[str], params: Params, version: int, idle: Callable[[], Awaitable[None]]
    ) -> None:
        """Makes new weights the current ones, and pushes them to all servers that answer.

        The weights are prepared alongside the current ones. Until `idle` returns, servers generate from the current
        weights, which are also given to servers that restart.

        Args:
          urls: Servers and routers. All of these servers must answer, but only one worker of each router. Workers that
            do not answer yet are given the weights later, before their first prompt.
          params: All weights of the policy.
          version: Number of training steps that produced the weights.
          idle: Waits until no generation is in progress.

        Raises:
          ServerError: If a server does not answer, does not accept the weights, or continues with others.
          OSError: If the weights cannot be written.
        """
        if self._sync is not None:
            if not self.current:  # A server that does not accept weights is rejected before any are written.
                await self._answering(urls)
            await asyncio.to_thread(self._sync.prepare, params, f"{self._run}-{version}")
        await idle()
        self.version, self.current = version, set()
        if self._sync is not None:
            await asyncio.to_thread(self._sync.switch)
            await self._push(urls)

    async def ensure_current(self, url: str) -> None:
        """Returns once the server has the current weights, regardless of those that it was started with.

        Raises:
          ServerError: If it does not answer, or does not accept them; or if the other host does not push them.
        """
        await self.dialect.wait_for(url, self._wait_seconds)
        if self._sync is None:
            await self._wait_for_version(url)
        elif url not in self.current or not await self._has_version(url):
            await self._push([url])
        self.current.add(url)

    async def sleep(self, urls: Sequence[str]) -> None:
        """Makes the servers free their memory until the next `update`, if `sleeps` is set and this host pushes.

        Raises:
          ServerError: If a server cannot, does not answer, or is a router.
        """
        if not self.sleeps or self._sync is None:
            return
        if any([(await self._endpoint(url)).is_router for url in urls]):
            raise ServerError(
                "rollouts.options.sleep=True does not support routers, which treat sleeping servers as failed; list "
                "the servers themselves in rollouts.urls."
            )
        try:
            async with open_client(self._timeout_seconds) as client:
                await asyncio.gather(*(lay_down(client, url) for url in urls))
        except httpx.HTTPError as error:
            raise ServerError(f"{', '.join(urls)} cannot be put to sleep: {describe(error)}; see its log.") from error

    def close(self) -> None:
        """Frees the stored weights."""
        if self._sync is not None:
            self._sync.close()

    async def _endpoint(self, url: str) -> Endpoint:
        """Waits for the server or router at `url` and probes it, once per URL.

        Raises:
          ServerError: If it does not answer, or is a server that does not accept weights.
        """
        if url not in self._endpoints:
            await self.dialect.wait_for(url, self._wait_seconds)
            endpoint = await self.dialect.probe(url)
            if not (endpoint.is_router or endpoint.takes_weights):
                raise ServerError(
                    f"{url} has no /update_weights_from_disk (sglang-jax has none), so it can be evaluated but not "
                    "trained over; train over SGLang servers, or with rollouts.name=embedded."
                )
            self._endpoints[url] = endpoint
        return self._endpoints[url]

    async def _listed(self, url: str) -> list[str]:
        """Returns the workers of the router at `url`, or `url` itself if there is a server."""
        is_router = (await self._endpoint(url)).is_router
        return await self.dialect.workers(url, self._wait_seconds) if is_router else [url]

    async def _answering(self, urls: Sequence[str]) -> list[str]:
        """Waits for the servers in `urls` and for one worker of each router; returns all that answer.

        Raises:
          ServerError: If one of them does not answer in time, or does not accept weights.
        """
        return list(itertools.chain(*await asyncio.gather(*map(self._answering_at, urls))))

    async def _answering_at(self, url: str) -> list[str]:
        deadline = time.monotonic() + self._wait_seconds
        if not (await self._endpoint(url)).is_router:
            await self.dialect.wait_for(url, self._wait_seconds)
            return [url]
        while True:
            workers = await self._listed(url)
            checks = (self.dialect.wait_for(worker, 0) for worker in workers)
            errors = await asyncio.gather(*checks, return_exceptions=True)
            if found := [worker for worker, error in zip(workers, errors, strict=True) if error is None]:
                await asyncio.gather(*map(self._endpoint, found))
                return found
            if time.monotonic() >= deadline:
                reason = errors[-1] if errors else "it lists none; start one, or correct the router's --worker-urls."
                raise ServerError(f"No worker of the router {url} answered within {self._wait_seconds:.0f} s: {reason}")
            await asyncio.sleep(LOOK_SECONDS)

    async def _push(self, urls: Sequence[str]) -> None:
        """Pauses the servers that answer, loads the current weights, resumes them, and checks that they use these.

        Raises:
          ServerError: If a server does not accept the weights, or continues with others.
        """
        assert self._sync is not None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            servers = await self._answering(urls)
            # A server whose update is interrupted may be paused or still loading, regardless of the version it reports.
            self.current -= set(servers)
            try:
                async with open_client(self._timeout_seconds) as client:
                    if self.dialect is SGLANG:  # a run that died may have left them asleep
                        await asyncio.gather(*(wake(client, url) for url in servers))
                    await asyncio.gather(*(self.dialect.pause(client, url) for url in servers))
                    await self._sync.push(client, servers)
                    await asyncio.gather(*(self.dialect.resume(client, url) for url in servers))
                    await asyncio.gather(*(self._check(client, url) for url in servers))
                self.current |= set(servers)
                return
            except httpx.HTTPError as error:
                print(f"The weight update of {', '.join(servers)} broke off: {describe(error)}.", file=sys.stderr)
                await asyncio.sleep(backoff_seconds(attempt))
        raise ServerError(f"The weights could not be pushed to {', '.join(urls)}, {MAX_ATTEMPTS} times in a row.")

    async def _has_version(self, url: str) -> bool:
        """Returns True if the server reports the name of the current weights."""
        try:
            return (await self.dialect.served_model(url)).weight_version == self.name
        except httpx.HTTPError:
            return False

    async def _wait_for_version(self, url: str) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while not await self._has_version(url):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{url} was not given the weights {self.name} in {self._timeout_seconds:g} s by the first host, "
                    "which pushes them; see its log, or raise rollouts.timeout_seconds."
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def _check(self, client: httpx.AsyncClient, url: str) -> None:
        """Asks for one token after a prompt that every earlier check has left in the cache.

        An old cache holds all of that prompt. A few of its tokens prove nothing, as others' prompts may start like it:
        SGLang's health check, which routers ask for, generates after the first of them.
        """
        version, cached_tokens = await self.dialect.probe_weights(client, url, self._probe_tokens)
        if version != self.name:
            raise ServerError(
                f"{url} generates from weights {version} after an update to {self.name}; see whether another run "
                "updates it."
            )
        if cached_tokens >= max(2, self._probe_tokens // 2):  # a health check leaves 1; pages of 64 tokens, half
            raise ServerError(
                f"{url} kept the cache of its old weights through an update to {self.name}; start it again."
            )
