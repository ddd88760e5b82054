"""Pushes weights of the policy to servers, and keeps track of the servers that have the current version.

A weight update has these steps:

1. The new weights are prepared (`WeightSync.prepare`), while servers still generate with the current ones.
2. `idle` waits until no generation is in progress, so that all generations of a batch have the same weights.
3. All servers that respond are paused, load the weights, and are resumed.
4. `ContentCheck` verifies the content of each server. Servers that fail are updated once more.

Workers of routers that do not respond during an update, servers that fail the verification twice, and servers that fail
later are updated in the same way by `ensure_current` before they are given prompts.

With `rollouts.in_flight`, step 2 is omitted, and generations in progress continue with the new weights after step 3.
Their completions are accepted after step 4, and only from verified servers. If an update of a server is repeated, its
generations are aborted, because their tokens may have been generated with other weights.
"""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import httpx

from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.servers.content_check import ContentCheck
from poly_epo_jax.rollouts.servers.dialect import Dialect
from poly_epo_jax.rollouts.servers.endpoints import Endpoints
from poly_epo_jax.rollouts.servers.weight_sync import WeightSync
from poly_epo_jax.system.http_client import ServerError, backoff_seconds, describe_error, open_client
from poly_epo_jax.types import Metrics, Params

MAX_ATTEMPTS = 8
"""Maximum number of attempts per weight update. Each attempt waits until the servers respond."""
REJECTED = "rejected"
"""Weight version of a server that has failed the verification, so that no process gives it prompts."""


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
      in_flight: Whether an update keeps the generations in progress instead of waiting for their end.

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
        *,
        sleeps: bool = False,
        in_flight: bool = False,
    ):
        self.version = 0
        self.current: set[str] = set()
        self.routers: frozenset[str] = frozenset()
        self.dialect, self.check, self._sync = dialect, check, sync
        self.sleeps, self.in_flight = sleeps, in_flight
        self._timeout_seconds, self._wait_seconds = timeout_seconds, wait_seconds
        self._endpoints = Endpoints(dialect, wait_seconds)
        self._versions: dict[str, int] = {}  # Number of training steps by name of the weights.
        self._update: asyncio.Future[None] | None = None  # The update in progress.
        self._aborted: set[str] = set()  # Servers whose generations this update has aborted.
        self._recoveries: set[asyncio.Task[None]] = set()
        # This name reveals two runs that update the same server by mistake. All processes of a run share it.
        self._run = hosts.run_on_first(lambda: secrets.token_hex(4))

    @property
    def name(self) -> str:
        """Name of the current weights on the servers."""
        return f"{self._run}-{self.version}"

    async def servers(self, urls: Sequence[str]) -> list[str]:
        """Returns the servers and the workers of the routers in `urls`, including workers that do not respond.

        Waits for the update in progress and, if the routers list no workers, until each has a worker that responds.

        Raises:
          ServerError: If a router does not respond or has no worker that responds within `wait_seconds`, or if a server
            in `urls` does not accept weights.
        """
        await self._settled()
        return await self._endpoints.all(urls)

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
          idle: Function that waits until no generation is in progress. Not called if `in_flight` is True.

        Raises:
          ServerError: If a server does not respond or does not accept the weights, or if all servers fail the
            verification.
          OSError: If the weights cannot be written.
        """
        if self._sync is not None:
            if not self.current:  # Servers that do not support updates raise an error before weights are written.
                await self._endpoints.answering(urls)
            await asyncio.to_thread(self._sync.prepare, params, f"{self._run}-{version}")
            await asyncio.to_thread(self.check.prepare, params)
        if not self.in_flight:
            await idle()
            self._versions.clear()
        async with self._update_in_progress():
            await self._switch(urls, version)

    async def accepted(self, url: str) -> Mapping[str, int]:
        """Returns the weights whose tokens are accepted in a completion that a server has just returned.

        If an update is in progress, waits until it has been verified.

        Returns:
          The versions of these weights by name. Empty if the server does not have the current weights.
        """
        if not self.in_flight:
            return self._versions
        is_early = self._update is not None
        await self._settled()
        return self._versions if url in self.current and not (is_early and url in self._aborted) else {}

    async def ensure_current(self, url: str) -> None:
        """Waits until a server responds, and pushes the current weights to it unless it has them.

        Raises:
          ServerError: If the server does not respond, does not accept the weights or fails the verification, or if the
            process that pushes the weights has not pushed them within `timeout_seconds`.
        """
        await self.dialect.wait_for(url, self._wait_seconds)
        await self._settled()
        recovery = asyncio.create_task(self._recover(url))
        self._recoveries.add(recovery)
        recovery.add_done_callback(self._recoveries.discard)
        await recovery

    async def sleep(self, urls: Sequence[str]) -> None:
        """Makes the servers free their memory until the next `update`, if `sleeps` is True and this process pushes.

        Raises:
          ServerError: If a server does not support this, does not respond, or is a router.
        """
        if not self.sleeps or self._sync is None:
            return
        if await self._endpoints.any_router(urls):
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

    async def _settled(self) -> None:
        """Waits until no update is in progress."""
        while self._update is not None:
            await asyncio.wait([self._update])

    @contextlib.asynccontextmanager
    async def _update_in_progress(self) -> AsyncIterator[None]:
        """Delays recoveries of servers until the context ends, after those in progress have ended."""
        self._update, self._aborted = asyncio.get_running_loop().create_future(), set()
        try:
            while self._recoveries:
                await asyncio.wait(self._recoveries)
            yield
        finally:
            self._update.set_result(None)
            self._update = None

    async def _switch(self, urls: Sequence[str], version: int) -> None:
        self.version, self.current = version, set()
        self._versions[self.name] = version
        if self._sync is None:
            return
        await asyncio.to_thread(self._sync.switch)
        self.check.switch()
        try:
            rejected = await self._push(urls, keep=self.in_flight)
        finally:
            self.check.release()
        if rejected and not self.current:
            raise ServerError(next(iter(rejected.values())))

    async def _recover(self, url: str) -> None:
        if self._sync is None:
            await self._endpoints.wait_for_version(url, self.name, self._timeout_seconds)
        elif not await self._is_current(url) and (rejected := await self._push([url])):
            raise ServerError(rejected[url])
        self.current.add(url)

    async def _push(self, urls: Sequence[str], keep: bool = False) -> dict[str, str]:
        """Updates and verifies the servers that respond, and repeats this once for servers that fail the verification.

        Args:
          urls: Servers, and routers whose workers are updated.
          keep: Whether the generations in progress are kept, unless the update is repeated.

        Returns:
          The error message of each server that has failed twice, keyed by URL.

        Raises:
          ServerError: If a server does not accept the weights.
        """
        rejected = await self._update_servers(urls, keep)
        if rejected:
            rejected = await self._update_servers(list(rejected))
        async with open_client(self._timeout_seconds) as client:
            for url, error in rejected.items():
                print(f"{error} It is not given prompts.", file=sys.stderr)
                with contextlib.suppress(httpx.HTTPError):  # A server that does not respond generates nothing.
                    await self.dialect.rename_weights(client, url, REJECTED)
        return rejected

    async def _update_servers(self, urls: Sequence[str], keep: bool = False) -> dict[str, str]:
        """Pauses the servers that respond, loads the current weights, resumes the servers, and verifies the update.

        Args:
          urls: Servers, and routers whose workers are updated.
          keep: Whether the first attempt keeps the generations in progress.

        Returns:
          The error message of each server that fails the verification, keyed by URL.

        Raises:
          ServerError: If a server does not accept the weights.
        """
        assert self._sync is not None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            servers = await self._endpoints.answering(urls)
            # A server whose update is interrupted may be paused or still loading, regardless of the version it reports.
            self.current -= set(servers)
            keep = keep and attempt == 1
            self._aborted |= set() if keep else set(servers)
            try:
                async with open_client(self._timeout_seconds) as client:
                    await asyncio.gather(*(self.dialect.pause(client, url, keep) for url in servers))
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
        if url not in self.current or not await self._endpoints.has_version(url, self.name):
            return False
        try:
            async with open_client(self._timeout_seconds) as client:
                return await self.check.has_weights(client, url, self.name)
        except httpx.HTTPError:
            return False
