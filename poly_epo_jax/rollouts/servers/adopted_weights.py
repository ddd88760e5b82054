"""Evaluation of servers with the weights that they already have."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import httpx

from poly_epo_jax.rollouts.servers.dialect import Dialect, ModelInfo
from poly_epo_jax.system.http_client import ServerError, describe_error
from poly_epo_jax.types import Metrics, Params


class AdoptedWeights:
    """The weights that all servers have at the start of a batch, as a replacement for `ServedWeights`.

    Args:
      dialect: API of the servers.
      wait_seconds: Timeout in seconds for a server that does not respond.
      weights: `ModelInfo.weights` that the servers must report. If None, any weights are adopted.

    Attributes:
      version: Always 0.
      name: Name of the weights on the servers.
      current: Servers and routers of the batch.
      routers: Routers of the batch. Prompts are sent to the router instead of its workers.
    """

    def __init__(self, dialect: Dialect, wait_seconds: float, weights: str | None = None):
        self.version, self.name = 0, ""
        self.current: set[str] = set()
        self.routers: set[str] = set()
        self.dialect, self._wait_seconds, self._required, self._adopted = dialect, wait_seconds, weights, ""

    async def servers(self, urls: Sequence[str]) -> list[str]:
        """Waits for all servers and routers in `urls`, adopts their weights, and returns `urls`.

        Raises:
          ServerError: If one of them does not respond or has no weights, if they have different weights, or if their
            weights are not the required weights.
        """
        await asyncio.gather(*(self.dialect.wait_for(url, self._wait_seconds) for url in urls))
        self.routers = {one.url for one in await asyncio.gather(*map(self.dialect.probe, urls)) if one.is_router}
        models = dict(zip(urls, await asyncio.gather(*map(self._model_at, urls)), strict=True))
        found = {url: model.weights for url, model in models.items()}
        if len(set(found.values())) > 1:
            raise ServerError(f"The servers have different weights: {found}; evaluate one server at a time.")
        if without := [url for url, model in models.items() if not model.has_weights]:
            raise ServerError(
                f"{', '.join(without)} has no weights, because a run with rollouts.options.sleep=True was killed. "
                "Restart it."
            )
        if self._required not in (None, found[urls[0]]):
            raise ServerError(f"The weights of {urls[0]} changed after the evaluation started; rerun it.")
        self._adopted, self.name, self.current = found[urls[0]], models[urls[0]].weight_version, set(urls)
        return list(urls)

    async def accepted(self, url: str) -> Mapping[str, int]:
        """Returns the version 0 of the adopted weights by their name."""
        return {self.name: self.version}

    async def ensure_current(self, url: str) -> None:
        """Waits until a server responds, and verifies that its weights have not changed.

        Raises:
          ServerError: If the server does not respond, or has other weights.
        """
        await self.dialect.wait_for(url, self._wait_seconds)
        if (await self._model_at(url)).weights != self._adopted:
            raise ServerError(f"The weights of {url} changed during the batch; rerun the evaluation.")

    async def update(
        self, urls: Sequence[str], params: Params, version: int, idle: Callable[[], Awaitable[None]]
    ) -> None:
        """Raises ValueError, because this class does not push weights."""
        raise ValueError("AdoptedWeights does not push weights to servers; use ServedWeights.")

    async def sleep(self, urls: Sequence[str]) -> None:
        """Does nothing, because the servers stay awake."""

    def metrics(self) -> Metrics:
        """Returns no counters, because no weights are pushed."""
        return {}

    def close(self) -> None:
        """Does nothing, because no weights are stored."""

    async def _model_at(self, url: str) -> ModelInfo:
        try:
            return await self.dialect.model_info(url)
        except httpx.HTTPError as error:
            raise ServerError(f"{url} does not report its model: {describe_error(error)}; see its log.") from error
