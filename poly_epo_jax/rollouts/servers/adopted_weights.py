"""The weights that servers have already, for evaluating them as they are."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx

from poly_epo_jax.rollouts.servers.dialect import Dialect
from poly_epo_jax.rollouts.sglang import SGLANG, check_awake
from poly_epo_jax.system.http_client import ServerError, describe
from poly_epo_jax.types import Params


class AdoptedWeights:
    """The weights that all servers have when a batch begins. Takes the place of `ServedWeights`.

    Args:
      wait_seconds: Maximum time in seconds to wait for a server that does not answer.
      dialect: The servers' dialect.

    Attributes:
      version: Always 0.
      name: Name of the weights on the servers.
      current: The servers of the batch.
      routers: Routers among them, which are given the prompts themselves.
    """

    def __init__(self, wait_seconds: float, dialect: Dialect = SGLANG):
        self.version, self.name = 0, ""
        self.current: set[str] = set()
        self.routers: set[str] = set()
        self.dialect = dialect
        self._wait_seconds = wait_seconds

    async def servers(self, urls: Sequence[str]) -> list[str]:
        """Waits for all servers and routers in `urls`, adopts the weights that they have, and returns `urls`.

        Raises:
          ServerError: If one does not answer or has no weights, or if they have different weights.
        """
        await asyncio.gather(*(self.dialect.wait_for(url, self._wait_seconds) for url in urls))
        endpoints = await asyncio.gather(*map(self.dialect.probe, urls))
        self.routers = {endpoint.url for endpoint in endpoints if endpoint.is_router}
        found = dict(zip(urls, await asyncio.gather(*map(self._name_at, urls)), strict=True))
        if len(set(found.values())) > 1:
            raise ServerError(f"The servers serve different weights, {found}; evaluate one at a time.")
        check_awake(found)
        self.name, self.current = found[urls[0]], set(urls)
        return list(urls)

    async def ensure_current(self, url: str) -> None:
        """Returns once the server answers again.

        Raises:
          ServerError: If it does not, or has other weights.
        """
        await self.dialect.wait_for(url, self._wait_seconds)
        if await self._name_at(url) != self.name:
            raise ServerError(f"{url} changed weights during the batch; rerun the evaluation.")

    async def update(
        self, urls: Sequence[str], params: Params, version: int, idle: Callable[[], Awaitable[None]]
    ) -> None:
        """Raises ValueError, because the servers keep their weights."""
        raise ValueError("This sampler was opened to leave the servers' weights as they are; give it weights.")

    async def sleep(self, urls: Sequence[str]) -> None:
        """Does nothing: the servers stay awake."""

    def close(self) -> None:
        """Does nothing: no weights are stored."""

    async def _name_at(self, url: str) -> str:
        try:
            return (await self.dialect.served_model(url)).weight_version
        except httpx.HTTPError as error:
            raise ServerError(f"{url} does not say what it serves: {describe(error)}; see its log.") from error
