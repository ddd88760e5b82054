"""SGLang's router and its workers: a worker that is dead or has other weights is taken out until it is current again.

The router by itself hides a death by asking another worker, and sends the dead worker prompts again as soon as it is
back, with whatever weights it was started with.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import httpx

from poly_epo_jax.checks import is_url
from poly_epo_jax.http_client import (
    ServerError,
    WrongAnswer,
    describe,
    field,
    open_client,
    read_json,
    wait_until_healthy,
)

WATCH_SECONDS = 1.0  # between two checks of the workers; no server starts in less
CHANGE_SECONDS = 120.0  # for the router to make a change; it asks a new worker for a token first


class Router:
    """A client of the router's list of workers; it waits for a router that does not answer."""

    def __init__(self, url: str, wait_seconds: float):
        self.url = url
        self._wait_seconds = wait_seconds
        self._out: dict[str, str] = {}  # the model's name, by URL of each worker that was taken out

    async def workers(self) -> list[str]:
        """URLs of the workers that the router has, and of those that were taken out.

        Raises:
          ServerError: the router does not name its workers.
        """
        await self._wait("health")
        return list(self._out | dict.fromkeys(await self._listed()))

    async def wait_for_worker(self) -> None:
        """Returns once the router has a worker to send prompts to.

        Raises:
          ServerError: it had none for too long.
        """
        await self._wait("readiness")

    def is_out(self, url: str) -> bool:
        return url in self._out

    async def take_out(self, url: str) -> None:
        """Takes a worker out; returns once the router sends it nothing more.

        Raises:
          ServerError: the router does not do this.
        """
        worker = (await self._listed()).get(url)
        if worker is not None:
            self._out[url] = worker["model_id"]  # recorded first, so that it is put back whatever happens
            await self._request("DELETE", f"/workers/{quote(worker['id'], safe='')}")
            await self._until(url, is_in=False)

    async def put_back(self, url: str) -> None:
        """Puts back a worker that was taken out; returns once the router sends it prompts again. Ignores other workers.

        Raises:
          ServerError: the router does not do this.
        """
        if url in self._out:
            await self._request("POST", "/workers", {"url": url, "model_id": self._out[url]})
            await self._until(url, is_in=True)
            self._out.pop(url, None)

    def close(self) -> None:
        """Leaves the router with the workers that it had; it accepts the dead ones once they answer."""
        asyncio.run(self._hand_back())

    async def _hand_back(self) -> None:
        while self._out:
            url, model = self._out.popitem()
            try:
                await self._request("POST", "/workers", {"url": url, "model_id": model})
            except ServerError as error:
                print(f"The worker {url} is still out: {error}", file=sys.stderr)

    async def _wait(self, endpoint: str) -> None:
        await wait_until_healthy(f"{self.url}/{endpoint}", self._wait_seconds, f"SGLang router {self.url}")

    async def _listed(self) -> dict[str, dict[str, str]]:
        """The id and the model of each worker, by URL."""
        answer = await self._request("GET", "/workers")
        try:
            return _read_workers(answer)
        except WrongAnswer as error:
            raise self._trouble("GET /workers", error) from error

    async def _until(self, url: str, is_in: bool) -> None:
        deadline = time.monotonic() + CHANGE_SECONDS
        while (url in await self._listed()) != is_in:
            if time.monotonic() > deadline:
                verb = "take in" if is_in else "give up"
                raise ServerError(f"The router {self.url} did not {verb} {url} in {CHANGE_SECONDS:.0f} s; see its log.")
            await asyncio.sleep(0.1)

    async def _request(self, method: str, path: str, body: dict[str, str] | None = None) -> Any:
        try:
            async with open_client(10.0) as client:
                return read_json(await client.request(method, f"{self.url}{path}", json=body))
        except httpx.HTTPError as error:
            raise self._trouble(f"{method} {path}", error) from error

    def _trouble(self, request: str, error: Exception) -> ServerError:
        return ServerError(f"The router {self.url} is in trouble: {request}: {describe(error)}.")


def _read_workers(answer: Any) -> dict[str, dict[str, str]]:
    workers = {}
    for worker in field(answer, "workers", list):
        url = field(worker, "url", str)
        if not is_url(url):
            raise WrongAnswer("a worker's URL is not of the form http://HOST:PORT, without a password")
        workers[url] = {name: field(worker, name, str) for name in ("id", "model_id")}
    return workers


class Watch:
    """Keeps a router's workers current. Lives for one batch, in one event loop.

    Args:
      is_current: whether a worker answers and has the current weights.
      ensure_current: returns once the worker does; raises to give the worker up for this batch.
    """

    def __init__(
        self,
        router: Router,
        is_current: Callable[[str], Awaitable[bool]],
        ensure_current: Callable[[str], Awaitable[None]],
    ):
        self._router, self._is_current, self._ensure_current = router, is_current, ensure_current
        self._restoring: dict[str, asyncio.Task[None]] = {}
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Looks once, and then keeps looking in the background.

        Raises:
          ServerError: the router is in trouble.
        """
        await self.look()
        self._task = asyncio.create_task(self._look_for_ever())

    async def look(self) -> None:
        """Takes out every worker that is not current, and puts it back as soon as it is.

        Raises:
          ServerError: the router is in trouble.
        """
        async with self._looking:
            urls = [url for url in await self._router.workers() if url not in self._restoring]
            current = await asyncio.gather(*(self._is_current(url) for url in urls))
            for url, good in zip(urls, current, strict=True):
                if not good:
                    await self._router.take_out(url)
                if self._router.is_out(url):
                    print(f"The worker {url} is out of the router until it has the present weights.", file=sys.stderr)
                    self._restoring[url] = asyncio.create_task(self._restore(url))

    async def close(self) -> None:
        """Stops looking and restoring; workers that are out at that point stay out."""
        tasks = [*self._restoring.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            with contextlib.suppress(ServerError):  # requests to the router fail too, and report it
                await self.look()

    async def _restore(self, url: str) -> None:
        try:
            await self._ensure_current(url)
            await self._router.put_back(url)
        except Exception as failure:  # of any kind: only this worker is given up
            print(f"The worker {url} stays out of the router: {failure}", file=sys.stderr)
        else:
            print(f"The worker {url} is back behind the router.", file=sys.stderr)
            del self._restoring[url]
