"""Pushes weights of the policy to servers, and keeps track of the servers that have the current version.

A weight update has these steps:

1. The new weights are prepared (`WeightSync.prepare`), while servers still generate with the current ones.
2. `idle` waits until no generation is in progress, so that all generations of a batch have the same weights.
3. All servers that respond are paused, load the weights, and are resumed.
4. `ContentCheck` verifies the content of each server. Servers that fail are updated once more.

Workers of routers that do not respond during an update, servers that fail the verification twice, and servers that fail
later are updated in the same way by `ensure_current` before they are given prompts.
"""

import asyncio
import contextlib
import itertools
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx

from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.servers.content_check import ContentCheck
from poly_epo_jax.rollouts.servers.dialect import Dialect, Endpoint
from poly_epo_jax.rollouts.servers.weight_sync import WeightSync
from poly_epo_jax.system.http_client import ServerError, backoff_seconds, describe_error, open_client
from poly_epo_jax.types import Metrics, Params

MAX_ATTEMPTS = 8
"""Maximum number of attempts per weight update. Each attempt waits until the servers respond."""
REJECTED = "rejected"
"""Weight version of a server that has failed the verification, so that no process gives it prompts."""
POLL_INTERVAL_SECONDS = 0.5  # Interval between checks for weights of another process, or for a worker of a router.


class ServedWeights:
    """Distributes one version of the policy's weights to servers, under a name that is unique to the run.

    Routers are replaced by their workers: weights and prompts are sent to the workers directly.

    Args:
      sync: Loads the weights. If None, another process pushes them to the same servers, and this process waits until
        the servers have them. In this case, all processes must have finished their generations before any of them calls
        `update`.
      dialect: API of the servers.
      check: Verifies weight updates.
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
        check: ContentCheck,
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
        self.check = check
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
          ServerError: If a server does not respond or does not accept the weights, or if all servers fail the
            verification.
          OSError: If the weights cannot be written.
        """
        if self._sync is not None:
            if not self.current:  # Servers that do not support updates raise an error before weights are written.
                await self._answering(urls)
            await asyncio.to_thread(self._sync.prepare, params, f"{self._run}-{version}")
            await asyncio.to_thread(self.check.prepare, params)
        await idle()
        self.version, self.current = version, set()
        if self._sync is not None:
            await asyncio.to_thread(self._sync.switch)
            self.check.switch()
            try:
                rejected = await self._push(urls)
            finally:
                self.check.release()
            if rejected and not self.current:
                raise ServerError(next(iter(rejected.values())))

    async def ensure_current(self, url: str) -> None:
        """Waits until a server responds, and pushes the current weights to it unless it has them.

        Raises:
          ServerError: If the server does not respond, does not accept the weights or fails the verification, or if the
            process that pushes the weights has not pushed them within `timeout_seconds`.
        """
        await self.dialect.wait_for(url, self._wait_seconds)
        if self._sync is None:
            await self._wait_for_version(url)
        elif not await self._is_current(url) and (rejected := await self._push([url])):
            raise ServerError(rejected[url])
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

    def metrics(self) -> Metrics:
        """Returns the counters of weight updates since the last call."""
        return self.check.metrics()

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

    async def _push(self, urls: Sequence[str]) -> dict[str, str]:
        """Updates and verifies the servers that respond, and repeats this once for servers that fail the verification.

        Returns:
          The error message of each server that has failed twice, keyed by URL.

        Raises:
          ServerError: If a server does not accept the weights.
        """
        rejected = await self._update_servers(urls)
        if rejected:
            rejected = await self._update_servers(list(rejected))
        async with open_client(self._timeout_seconds) as client:
            for url, error in rejected.items():
                print(f"{error} It is not given prompts.", file=sys.stderr)
                with contextlib.suppress(httpx.HTTPError):  # A server that does not respond generates nothing.
                    await self.dialect.rename_weights(client, url, REJECTED)
        return rejected

    async def _update_servers(self, urls: Sequence[str]) -> dict[str, str]:
        """Pauses the servers that respond, loads the current weights, resumes the servers, and verifies the update.

        Returns:
          The error message of each server that fails the verification, keyed by URL.

        Raises:
          ServerError: If a server does not accept the weights.
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
                    rejected = await self.check.verify(client, servers, self.name)
                self.current |= set(servers) - rejected.keys()
                return rejected
            except httpx.HTTPError as error:
                print(
                    f"The weight update of {', '.join(servers)} was interrupted: {describe_error(error)}. Retrying.",
                    file=sys.stderr,
                )
                await asyncio.sleep(backoff_seconds(attempt))
        raise ServerError(
            f"Failed to push weights to {', '.join(urls)} in {MAX_ATTEMPTS} attempts; see the server logs."
        )

    async def _is_current(self, url: str) -> bool:
        """Returns True if the server was verified with the current weights, and still has their name and content."""
        if url not in self.current or not await self._has_version(url):
            return False
        try:
            async with open_client(self._timeout_seconds) as client:
                return await self.check.has_weights(client, url, self.name)
        except httpx.HTTPError:
            return False

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
