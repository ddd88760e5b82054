"""The weights that servers generate from: which they are, and how every server gets the current ones."""

import asyncio
import secrets
import sys
import time
from collections.abc import Collection, Sequence

import httpx

from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.servers.dialect import Dialect
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

    Args:
      sync: how weights are loaded; None: another host pushes them to the same servers, and this host waits until the
        servers have them. All hosts must then have finished their generations before any of them calls `push`.
      max_prompt_tokens: the longest prompt that the servers are ever given.
      timeout_seconds: for one weight update.
      wait_seconds: how long to wait for a server that does not answer.
      dialect: the servers' dialect.
      sleeps: whether the servers free their memory from `sleep` to the next `push`; only SGLang's servers can.
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
        self.sleeps = sleeps
        self.unfinished: set[str] = set()
        """Servers whose last push broke off: whatever they report, they may be paused or still loading weights."""
        self._sync = sync
        self._probe_tokens = min(PROBE_TOKENS, max_prompt_tokens)
        self._timeout_seconds = timeout_seconds
        self._wait_seconds = wait_seconds
        self._dialect = dialect
        # Two runs that update the same server by mistake notice each other by this word; all hosts use the same one.
        self._run = hosts.on_first(lambda: secrets.token_hex(4))

    @property
    def name(self) -> str:
        """What the servers call the current weights."""
        return f"{self._run}-{self.version}"

    def prepare(self, params: Params, version: int) -> None:
        """Prepares weights; until `switch`, servers still load the current ones."""
        if self._sync is not None:
            self._sync.prepare(params, f"{self._run}-{version}")

    def switch(self, version: int) -> None:
        """Makes the prepared weights the current ones."""
        self.version = version
        if self._sync is not None:
            self._sync.switch()

    def close(self) -> None:
        """Frees whatever is held."""
        if self._sync is not None:
            self._sync.close()

    @property
    def is_pushing(self) -> bool:
        """Whether this process is the one that pushes the weights."""
        return self._sync is not None

    async def is_current(self, url: str) -> bool:
        """Whether the server answers, has the current weights, and generates from them."""
        if url in self.unfinished:
            return False
        try:
            return (await self._dialect.served_model(url)).weight_version == self.name
        except httpx.HTTPError:
            return False

    async def ensure_current(self, url: str) -> None:
        """Returns once the server has the current weights, whatever it was started with.

        Raises:
          ServerError: it does not answer, or does not accept them.
        """
        await self._dialect.wait_for(url, self._wait_seconds)
        if not await self.is_current(url):
            await self.push([url])

    async def sleep(self, urls: Sequence[str], routers: Collection[str]) -> None:
        """Has the servers free their memory until the next `push`, if this host is the one that pushes.

        Raises:
          ServerError: a server cannot, does not answer, or is a router.
        """
        if not (self.sleeps and self.is_pushing):
            return
        if routers:
            raise ServerError(
                "rollouts.options.sleep=True needs the servers themselves in rollouts.urls, not a router, which would "
                "take those that sleep for dead."
            )
        try:
            async with open_client(self._timeout_seconds) as client:
                await asyncio.gather(*(lay_down(client, url) for url in urls))
        except httpx.HTTPError as error:
            raise ServerError(f"{', '.join(urls)} cannot be put to sleep: {describe(error)}; see its log.") from error

    async def push(self, urls: Sequence[str]) -> None:
        """Pauses the servers, loads the current weights into them, resumes them, and checks that they use the weights.

        Raises:
          ServerError: a server does not accept them, or continues with others; or the other host does not push them.
        """
        if self._sync is None:
            await asyncio.gather(*(self._wait_for_version(url) for url in urls))
            return
        self.unfinished |= set(urls)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            await asyncio.gather(*(self._dialect.wait_for(url, self._wait_seconds) for url in urls))
            try:
                async with open_client(self._timeout_seconds) as client:
                    if self._dialect is SGLANG:  # a run that died may have left them asleep
                        await asyncio.gather(*(wake(client, url) for url in urls))
                    await asyncio.gather(*(self._dialect.pause(client, url) for url in urls))
                    await self._sync.push(client, urls)
                    await asyncio.gather(*(self._dialect.resume(client, url) for url in urls))
                    await asyncio.gather(*(self._check(client, url) for url in urls))
                self.unfinished -= set(urls)
                return
            except httpx.HTTPError as error:
                print(f"The weight update of {', '.join(urls)} broke off: {describe(error)}.", file=sys.stderr)
                await asyncio.sleep(backoff_seconds(attempt))
        raise ServerError(f"The weights could not be pushed to {', '.join(urls)}, {MAX_ATTEMPTS} times in a row.")

    async def _wait_for_version(self, url: str) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while not await self.is_current(url):
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
        version, cached_tokens = await self._dialect.probe_weights(client, url, self._probe_tokens)
        if version != self.name:
            raise ServerError(
                f"{url} generates from weights {version} after an update to {self.name}; see whether another run "
                "updates it."
            )
        if cached_tokens >= max(2, self._probe_tokens // 2):  # a health check leaves 1; pages of 64 tokens, half
            raise ServerError(
                f"{url} kept the cache of its old weights through an update to {self.name}; start it again."
            )
