"""Distributes the requests of a batch over servers: sends each to the least busy one, and recovers failed servers."""

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.system.run_to_completion import cancel_all


@dataclasses.dataclass(eq=False)
class Server:
    """A server and its outstanding requests.

    Attributes:
      url: URL of the server.
      num_generations: Number of outstanding generations.
      tokens: Maximum number of outstanding tokens: prompts, and generations at their maximum length.
      is_up: Whether the server can be given requests.
      has_failed: Whether the server has failed in this batch.
      reported_invalid: Whether an invalid completion of the server has been reported on stderr.
      failure: Error of a failed recovery. If set, the server is not used for the rest of the batch.
    """

    url: str
    num_generations: int = 0
    tokens: int = 0
    is_up: bool = True
    has_failed: bool = False
    reported_invalid: bool = False
    failure: Exception | None = None


class ServerPool:
    """Selects the server of each request. A pool is used for one batch or several concurrent ones, in one event loop.

    Args:
      urls: All servers of the batch.
      ready: Servers that can be given requests immediately. The other servers are recovered in the background.
      max_concurrent: Maximum number of generations that run on one server at once. Further requests wait for a server
        with free capacity. A request with more generations waits for an idle server.
      recover: Function that waits until a server can be given requests. If it raises, the server is not used for the
        rest of the batch.
    """

    def __init__(
        self,
        urls: Sequence[str],
        ready: Collection[str],
        max_concurrent: int,
        recover: Callable[[str], Awaitable[None]],
    ):
        self.num_batches = 0
        self._servers = [Server(url, is_up=url in ready) for url in urls]
        self._max_concurrent = max_concurrent
        self._recover = recover
        self._changed = asyncio.Condition()
        self._recoveries: set[asyncio.Task[None]] = set()
        for server in self._servers:
            if not server.is_up:
                self._start_recovery(server)

    @asynccontextmanager
    async def lease(self, num_generations: int, tokens: int, other_than: Server | None = None) -> AsyncIterator[Server]:
        """Waits for free capacity, and assigns a request to the server with the fewest outstanding tokens.

        Args:
          num_generations: Number of generations of the request. An idle server accepts any number.
          tokens: Maximum number of tokens of the request: prompts, and generations at their maximum length.
          other_than: Server to avoid if another server is up.

        Yields:
          The server. Its capacity is released when the context ends.

        Raises:
          ServerError: If the recovery of every server has failed.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._next(num_generations, other_than) or all(server.failure for server in self._servers)
            )
            server = self._next(num_generations, other_than)
            if server is None:
                failures = [server.failure for server in self._servers if server.failure is not None]
                raise ServerError(f"All servers have failed. {failures[-1]}") from failures[-1]
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
        """Marks a server as failed, and starts its recovery. It does not receive requests until it has recovered.

        Args:
          server: The server.
          why: Description of the failure, for stderr.
        """
        if server.is_up:
            server.is_up, server.has_failed = False, True
            print(f"Server {server.url} failed: {why}. Its prompts are retried.", file=sys.stderr)
            self._start_recovery(server)

    async def close(self) -> None:
        """Cancels the recovery of failed servers."""
        await cancel_all(self._recoveries)

    def _next(self, num_generations: int, other_than: Server | None) -> Server | None:
        """Returns the server for the next request, or None if no server has free capacity."""
        up = [server for server in self._servers if server.is_up]
        up = [server for server in up if server is not other_than] or up
        return min(
            (s for s in up if not s.num_generations or s.num_generations + num_generations <= self._max_concurrent),
            key=lambda server: server.tokens,
            default=None,
        )

    def _start_recovery(self, server: Server) -> None:
        task = asyncio.create_task(self._recover_server(server))
        self._recoveries.add(task)
        task.add_done_callback(self._recoveries.discard)

    async def _recover_server(self, server: Server) -> None:
        try:
            await self._recover(server.url)
            server.is_up = True
            if server.has_failed:
                print(f"Server {server.url} has recovered.", file=sys.stderr)
        except Exception as failure:  # Any error is stored, so that it reaches the requests that wait for a server.
            server.failure = failure
            print(f"Server {server.url} is not used for the rest of this batch: {failure}", file=sys.stderr)
        async with self._changed:
            self._changed.notify_all()
