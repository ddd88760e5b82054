"""Several servers share one batch: each request goes to the least busy one, and a failed one is waited for."""

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from poly_epo_jax.system.http_client import ServerError


@dataclasses.dataclass(eq=False)
class Server:
    """A server, and the requests that it has not answered yet."""

    url: str
    num_generations: int = 0
    tokens: int = 0  # of the prompts, and of their generations at their longest
    is_up: bool = True
    has_failed: bool = False  # in this batch
    has_erred: bool = False  # a wrong answer has been reported
    failure: Exception | None = None  # why it was given up


class Fleet:
    """Chooses the server of each request. Lives for one batch, in one event loop.

    Args:
      urls: All servers of the batch.
      ready: Servers that can be asked at once. The others are revived first, which delays no request if one is ready.
      max_concurrent: Maximum number of generations that one server is given at once. The rest wait for the next free
        server.
      revive: Waits until a server can be asked. If it raises, the server is given up for this batch.
    """

    def __init__(
        self,
        urls: Sequence[str],
        ready: Collection[str],
        max_concurrent: int,
        revive: Callable[[str], Awaitable[None]],
    ):
        self._servers = [Server(url, is_up=url in ready) for url in urls]
        self._max_concurrent = max_concurrent
        self._revive = revive
        self._changed = asyncio.Condition()
        self._revivals: set[asyncio.Task[None]] = set()
        for server in self._servers:
            if not server.is_up:
                self._start_revival(server)

    @asynccontextmanager
    async def lease(self, num_generations: int, tokens: int, other_than: Server | None = None) -> AsyncIterator[Server]:
        """The server with the fewest outstanding tokens, once one has room; not `other_than` if another one is up.

        Raises:
          ServerError: If every server has been given up.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._next(num_generations, other_than) or not self._any_left())
            server = self._next(num_generations, other_than)
            if server is None:
                failures = [server.failure for server in self._servers if server.failure is not None]
                raise ServerError(f"No server is left to generate. {failures[-1]}") from failures[-1]
            server.num_generations += num_generations
            server.tokens += tokens
        try:
            yield server
        finally:
            server.num_generations -= num_generations
            server.tokens -= tokens
            async with self._changed:
                self._changed.notify_all()

    def fail(self, server: Server, why: str) -> None:
        """Sends the server nothing more until it is revived."""
        if server.is_up:
            server.is_up, server.has_failed = False, True
            print(f"The server {server.url} failed: {why}. Its prompts wait or go to others.", file=sys.stderr)
            self._start_revival(server)

    async def close(self) -> None:
        """Stops waiting for failed servers."""
        for task in self._revivals:
            task.cancel()
        await asyncio.gather(*self._revivals, return_exceptions=True)

    def _next(self, num_generations: int, other_than: Server | None) -> Server | None:
        """The server for the next request, if one has room. An idle server takes any number of generations."""
        up = [server for server in self._servers if server.is_up]
        up = [server for server in up if server is not other_than] or up
        free = [s for s in up if not s.num_generations or s.num_generations + num_generations <= self._max_concurrent]
        return min(free, key=lambda server: server.tokens, default=None)

    def _any_left(self) -> bool:
        return any(server.failure is None for server in self._servers)

    def _start_revival(self, server: Server) -> None:
        task = asyncio.create_task(self._revive_server(server))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive_server(self, server: Server) -> None:
        try:
            await self._revive(server.url)
            server.is_up = True
            if server.has_failed:
                print(f"The server {server.url} is back.", file=sys.stderr)
        except Exception as failure:  # of any kind: it is raised to the requests that wait for this server
            server.failure = failure
            print(f"The server {server.url} is given up for this batch: {failure}", file=sys.stderr)
        async with self._changed:
            self._changed.notify_all()
