"""Pushes weights of the policy to servers, and keeps track of the servers that have the current version.

A weight update has these steps:

1. The new weights are prepared (`WeightSync.prepare`), while servers still generate with the current ones.
2. `idle` waits until no generation is in progress, so that all generations of a batch have the same weights.
3. All servers that respond are paused, load the weights, and are resumed.
4. Each server generates one token. It must report the new weight version and must not use its old cache.

Workers of routers that do not respond during an update, and servers that fail later, are updated in the same way by
`ensure_current` before they are given prompts again.
"""

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
from poly_epo_jax.system.http_client import ServerError, backoff_seconds, describe_error, open_client
from poly_epo_jax.types import Params

MAX_ATTEMPTS = 8
"""Maximum number of attempts per weight update. Each attempt waits until the servers respond."""
PROBE_TOKENS = 128
"""Maximum number of prompt tokens of the request that verifies an update."""
POLL_INTERVAL_SECONDS = 0.5  # Interval between checks for weights of another process, or for a worker of a router.


class ServedWeights:
    """Distributes one version of the policy's weights to servers, under a name that is unique to the run.

    Routers are replaced by their workers: weights and prompts are sent to the workers directly.

    Args:
      sync: Loads the weights. If None, another process pushes them to the same servers, and this process waits until
        the servers have them. In this case, all processes must have finished their generations before any of them calls
        `update`.
      dialect: API of the servers.
      max_prompt_tokens: Maximum number of tokens of a prompt.
      timeout_seconds: Timeout in seconds of one weight update.
      wait_seconds: Timeout in seconds for a server that does not respond.
      sleeps: Whether the servers free their memory from `sleep` to the next `update`.

    Attributes:
      version: Number of training steps that produced the current weights.
      current: Servers that have been verified to use the current weights. All other servers are checked, and updated if
        necessary, before they are given prompts.
      routers: Routers that are given prompts. Always empty.
    """

    def __init__(
        self,
        sync: WeightSync | None,
        dialect: Dialect,
        max_prompt_tokens: int,
        timeout_seconds: float,
        wait_seconds: float,
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
        # This name reveals two runs that update the same server by mistake. All processes of a run share it.
        self._run = hosts.run_on_first(lambda: secrets.token_hex(4))

    @property
    def name(self) -> str:
        """Name of the current weights on the servers."""
        return f"{self._run}-{self.version}"

    async def servers(self, urls: Sequence[str]) -> list[str]:
        """Returns the servers and the workers of the routers in `urls`, including workers that do not respond.

        If the routers list no workers, waits until each router has a worker that responds.

        Raises:
          ServerError: If a router does not respond or has no worker that responds within `wait_seconds`, or if a server
            in `urls` does not accept weights.
        """
        listed = itertools.chain(*[await self._listed(url) for url in urls])
        return list(dict.fromkeys(listed)) or await self._answering(urls)

    async def update(
        self, urls: Sequence[str], params: Params, version: int, idle: Callable[[], Awaitable[None]]
    ) -> None:
        """Makes new weights the current ones, and pushes them to all servers that respond.

        Until `idle` returns, servers generate with the previous weights, which are also pushed to servers that restart.

        Args:
          urls: Servers and routers. All listed servers and at least one worker of each router must respond. Workers
            that do not respond are updated later, before they are given prompts.
          params: All weights of the policy.
          version: Number of training steps that produced the weights.
          idle: Function that waits until no generation is in progress.

        Raises:
          ServerError: If a server does not respond, does not accept the weights, or generates with other weights
            afterwards.
          OSError: If the weights cannot be written.
        """
        if self._sync is not None:
            if not self.current:  # Servers that do not support updates raise an error before weights are written.
                await self._answering(urls)
            await asyncio.to_thread(self._sync.prepare, params, f"{self._run}-{version}")
        await idle()
        self.version, self.current = version, set()
        if self._sync is not None:
            await asyncio.to_thread(self._sync.switch)
            await self._push(urls)

    async def ensure_current(self, url: str) -> None:
        """Waits until a server responds, and pushes the current weights to it unless it has them.

        Raises:
          ServerError: If the server does not respond or does not accept the weights, or if the process that pushes the
            weights has not pushed them within `timeout_seconds`.
        """
        await self.dialect.wait_for(url, self._wait_seconds)
        if self._sync is None:
            await self._wait_for_version(url)
        elif url not in self.current or not await self._has_version(url):
            await self._push([url])
        self.current.add(url)

    async def sleep(self, urls: Sequence[str]) -> None:
        """Makes the servers free their memory until the next `update`, if `sleeps` is True and this process pushes.

        Raises:
          ServerError: If a server does not support this, does not respond, or is a router.
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
                await asyncio.gather(*(self.dialect.sleep(client, url) for url in urls))
        except httpx.HTTPError as error:
            raise ServerError(
                f"Failed to put {', '.join(urls)} to sleep: {describe_error(error)}; see its log."
            ) from error

    def close(self) -> None:
        """Frees the stored weights."""
        if self._sync is not None:
            self._sync.close()

    async def _endpoint(self, url: str) -> Endpoint:
        """Waits for the server or router at `url` and determines its kind. The result is cached.

        Raises:
          ServerError: If it does not respond, or is a server that does not accept weights.
        """
        if url not in self._endpoints:
            await self.dialect.wait_for(url, self._wait_seconds)
            endpoint = await self.dialect.probe(url)
            if endpoint.update_error and not endpoint.is_router:
                raise ServerError(endpoint.update_error)
            self._endpoints[url] = endpoint
        return self._endpoints[url]

    async def _listed(self, url: str) -> list[str]:
        """Returns the workers of the router at `url`, or `url` itself if it belongs to a server."""
        is_router = (await self._endpoint(url)).is_router
        return await self.dialect.workers(url, self._wait_seconds) if is_router else [url]

    async def _answering(self, urls: Sequence[str]) -> list[str]:
        """Waits for all servers in `urls` and one worker of each router, and returns all that respond.

        Raises:
          ServerError: If one of them does not respond within `wait_seconds`, or does not accept weights.
        """
        return list(dict.fromkeys(itertools.chain(*await asyncio.gather(*map(self._answering_at, urls)))))

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
                reason = errors[-1] if errors else "it lists no workers; start one, or correct its --worker-urls."
                raise ServerError(f"No worker of router {url} responded within {self._wait_seconds:.0f} s: {reason}")
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _push(self, urls: Sequence[str]) -> None:
        """Pauses the servers that respond, loads the current weights, resumes the servers, and verifies the update.

        Raises:
          ServerError: If a server does not accept the weights, or generates with other weights afterwards.
        """
        assert self._sync is not None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            servers = await self._answering(urls)
            # A server whose update is interrupted may be paused or still loading, regardless of the version it reports.
            self.current -= set(servers)
            try:
                async with open_client(self._timeout_seconds) as client:
                    await asyncio.gather(*(self.dialect.pause(client, url) for url in servers))
                    await self._sync.push(client, servers, self.dialect)
                    await asyncio.gather(*(self.dialect.resume(client, url) for url in servers))
                    await asyncio.gather(*(self._check(client, url) for url in servers))
                self.current |= set(servers)
                return
            except httpx.HTTPError as error:
                print(
                    f"The weight update of {', '.join(servers)} was interrupted: {describe_error(error)}. Retrying.",
                    file=sys.stderr,
                )
                await asyncio.sleep(backoff_seconds(attempt))
        raise ServerError(
            f"Failed to push weights to {', '.join(urls)} in {MAX_ATTEMPTS} attempts; see the server logs."
        )

    async def _has_version(self, url: str) -> bool:
        """Returns True if the server reports the name of the current weights."""
        try:
            return (await self.dialect.model_info(url)).weight_version == self.name
        except httpx.HTTPError:
            return False

    async def _wait_for_version(self, url: str) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while not await self._has_version(url):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"The first process did not push weights {self.name} to {url} within {self._timeout_seconds:g} s; "
                    "see its log, or raise rollouts.timeout_seconds."
                )
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _check(self, client: httpx.AsyncClient, url: str) -> None:
        """Verifies an update by generating one token after a fixed prompt, which every earlier check left in the cache.

        A cache that was not flushed contains the entire prompt. A few cached tokens are accepted, because other prompts
        may begin with the same tokens: the health checks of some servers, which routers call, generate a token after
        the first of them.
        """
        version, cached_tokens = await self.dialect.probe_weights(client, url, self._probe_tokens)
        if version != self.name:
            raise ServerError(
                f"{url} generates with weights {version} after an update to {self.name}; check whether another run "
                "updates the same server."
            )
        # A health check leaves 1 cached token. A stale cache with pages of 64 tokens still covers half of the prompt.
        if cached_tokens >= max(2, self._probe_tokens // 2):
            raise ServerError(f"{url} did not flush its cache during an update to {self.name}; restart it.")
