"""What every client of a server needs: an error in one sentence, a back-off, and a wait that says what it waits for."""

import asyncio
import functools
import ssl
import sys
import time
from collections.abc import Mapping

import httpx

MAX_BACKOFF_SECONDS = 20.0


class ServerError(ConnectionError):
    """A server that cannot be worked with; the message names its address and what to do."""


@functools.cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reading them takes longer than a request


def open_client(timeout_seconds: float) -> httpx.AsyncClient:
    """A client for any number of concurrent requests, each of which may take `timeout_seconds` to be answered."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(timeout_seconds, connect=10.0)
    return httpx.AsyncClient(timeout=timeout, limits=limits, verify=_certificates(), trust_env=False)


def backoff_seconds(attempt: int) -> float:
    """How long to wait before trying again, after `attempt` failures (counted from 1) in a row."""
    return min(0.5 * 2 ** (attempt - 1), MAX_BACKOFF_SECONDS)


def describe(error: Exception) -> str:
    """A phrase for what went wrong between us and a server; httpx leaves many of its errors without words."""
    match error:
        case httpx.ConnectError():
            return "it does not accept connections"
        case httpx.TimeoutException():
            return "it did not answer in time"
        case httpx.HTTPStatusError():
            return f"it answered {error.response.status_code}"
        case _:
            return f"the connection broke ({str(error) or type(error).__name__})"


async def wait_until_healthy(url: str, seconds: float, name: str, headers: Mapping[str, str] | None = None) -> None:
    """Returns once `url` answers 200, and says on stderr that it waits where that takes longer than a moment.

    Raises:
      ServerError: it did not within `seconds`, or it wants another key.
    """
    start, announced, status = time.monotonic(), False, 0
    async with open_client(10.0) as client:
        while True:
            try:
                response = await client.get(url, headers=headers)
                status = response.status_code
                response.raise_for_status()
            except httpx.HTTPError as error:
                problem = describe(error)
            else:
                if announced:
                    print(f"{name} answers.", file=sys.stderr)
                return
            waited = time.monotonic() - start
            if waited >= seconds or status in (401, 403):
                raise ServerError(
                    f"{name} did not become healthy within {waited:.0f} s: GET {url}: {problem}; start it, or correct "
                    "its address or key."
                )
            if not announced:
                announced = True
                print(f"Waiting up to {seconds:.0f} s for {name} (GET {url}: {problem}) ...", file=sys.stderr)
            await asyncio.sleep(min(1.0, seconds - waited))
