"""Determines the servers behind the configured URLs, where routers are replaced by their workers, and their weights."""

import asyncio
import itertools
import time
from collections.abc import Sequence

import httpx

from poly_epo_jax.rollouts.servers.dialect import Dialect, Endpoint
from poly_epo_jax.system.http_client import ServerError

POLL_INTERVAL_SECONDS = 0.5  # Interval between checks for weights of another process, or for a worker of a router.


class Endpoints:
    """The servers, routers and workers of routers that accept weights.

    Args:
      dialect: API of the servers.
      wait_seconds: Timeout in seconds for a server that does not respond.
    """

    def __init__(self, dialect: Dialect, wait_seconds: float):
        self._dialect, self._wait_seconds = dialect, wait_seconds
        self._endpoints: dict[str, Endpoint] = {}

    async def all(self, urls: Sequence[str]) -> list[str]:
        """Returns the servers and the workers of the routers in `urls`, including workers that do not respond.

        If the routers list no workers, waits until each router has a worker that responds.

        Raises:
          ServerError: If a router does not respond or has no worker that responds within `wait_seconds`, or if a server
            in `urls` does not accept weights.
        """
        workers = [worker for url in urls for worker in await self._listed(url)]
        return list(dict.fromkeys(workers)) or await self.answering(urls)

    async def any_router(self, urls: Sequence[str]) -> bool:
        """Returns True if `urls` contains a router."""
        return any([(await self._endpoint(url)).is_router for url in urls])

    async def answering(self, urls: Sequence[str]) -> list[str]:
        """Waits for all servers in `urls` and one worker of each router, and returns all that respond.

        Raises:
          ServerError: If one of them does not respond within `wait_seconds`, or does not accept weights.
        """
        return list(dict.fromkeys(itertools.chain(*await asyncio.gather(*map(self._answering_at, urls)))))

    async def has_version(self, url: str, name: str) -> bool:
        """Returns True if the server reports weights with this name."""
        try:
            return (await self._dialect.model_info(url)).weight_version == name
        except httpx.HTTPError:
            return False

    async def wait_for_version(self, url: str, name: str, seconds: float) -> None:
        """Waits until the first process has pushed weights to a server.

        Args:
          url: URL of the server.
          name: Name of the weights.
          seconds: Timeout in seconds.

        Raises:
          ServerError: If the server does not report the weights within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not await self.has_version(url, name):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"The first process did not push weights {name} to {url} within {seconds:g} s; "
                    "see its log, or raise rollouts.timeout_seconds."
                )
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _answering_at(self, url: str) -> list[str]:
        deadline = time.monotonic() + self._wait_seconds
        if not (await self._endpoint(url)).is_router:
            await self._dialect.wait_for(url, self._wait_seconds)
            return [url]
        while True:
            workers = await self._listed(url)
            errors = await asyncio.gather(
                *(self._dialect.wait_for(worker, 0) for worker in workers), return_exceptions=True
            )
            if found := [worker for worker, error in zip(workers, errors, strict=True) if error is None]:
                await asyncio.gather(*map(self._endpoint, found))
                return found
            if time.monotonic() >= deadline:
                reason = errors[-1] if errors else "it lists no workers; start one, or correct its --worker-urls."
                raise ServerError(f"No worker of router {url} responded within {self._wait_seconds:g} s: {reason}")
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _endpoint(self, url: str) -> Endpoint:
        """Waits for the server or router at `url` and determines its kind. The result is cached.

        Raises:
          ServerError: If it does not respond, or is a server that does not accept weights.
        """
        if url not in self._endpoints:
            await self._dialect.wait_for(url, self._wait_seconds)
            endpoint = await self._dialect.probe(url)
            if endpoint.update_error and not endpoint.is_router:
                raise ServerError(endpoint.update_error)
            self._endpoints[url] = endpoint
        return self._endpoints[url]

    async def _listed(self, url: str) -> list[str]:
        """Returns the workers of the router at `url`, or `url` itself if it belongs to a server."""
        is_router = (await self._endpoint(url)).is_router
        return await self._dialect.workers(url, self._wait_seconds) if is_router else [url]
