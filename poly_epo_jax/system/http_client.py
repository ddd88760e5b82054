"""What every client of a server needs: answers that are complete, bounded and checked field by field; a back-off.

An answer that is not what was requested raises WrongAnswer, which is an httpx error: code that waits for a server that
does not answer also survives one that answers nonsense. Errors are phrases that end a sentence about the server.
"""

import asyncio
import functools
import ssl
import sys
import time
from collections.abc import Mapping
from reprlib import repr as _brief
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

MAX_BACKOFF_SECONDS = 20.0
MAX_BYTES = 10**7
"""The longest answer, unless a longer one was requested. As Python objects it takes up to thirty times as much."""
MAX_QUOTED = 500  # characters of a server's text in an error

_KINDS: dict[type, str] = {
    str: "printable text",
    int: "whole number",
    float: "number with a point",
    list: "list",
    dict: "object",
}


class ServerError(ConnectionError):
    """A server that cannot be used; the message names its address and what to do."""


class WrongAnswer(httpx.HTTPError):
    """An answer that is not what was requested; the message says what is wrong, and names the field."""


class _Bounded(httpx.AsyncBaseTransport):
    """Passes on complete answers without their headers, so no header has them decompressed, decoded or redirected.

    httpx's own timeouts apply to each piece of an answer; `seconds` applies to the whole.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, seconds: float, max_bytes: int):
        self._transport, self._seconds, self._max_bytes = transport, seconds, max_bytes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._transport.handle_async_request(request)
                try:
                    return httpx.Response(answer.status_code, content=await self._read(answer))
                finally:
                    await answer.aclose()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer in {self._seconds:g} s") from None

    async def _read(self, answer: httpx.Response) -> bytes:
        if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
            raise WrongAnswer(f"it answered in the encoding {_brief(encoding)}, which was not asked for")
        pieces, size = [], 0
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        async for piece in answer.stream:
            pieces.append(piece)
            size += len(piece)
            if size > self._max_bytes:
                raise WrongAnswer(f"its answer is longer than {self._max_bytes} bytes")
        return b"".join(pieces)

    async def aclose(self) -> None:
        await self._transport.aclose()


@functools.cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reading them takes longer than a request


def open_transport() -> httpx.AsyncBaseTransport:
    """A transport for any number of requests at once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncHTTPTransport(verify=_certificates(), limits=limits, trust_env=False)


def open_client(timeout_seconds: float, max_bytes: int = MAX_BYTES) -> httpx.AsyncClient:
    """A client for any number of requests at once, with limits on the time and the bytes of each whole answer."""
    return httpx.AsyncClient(
        transport=_Bounded(open_transport(), timeout_seconds, max_bytes),
        timeout=httpx.Timeout(None, connect=10.0),
        headers={"Accept-Encoding": "identity"},
        trust_env=False,
    )


def read_json(answer: httpx.Response) -> Any:
    """The JSON content of a successful answer.

    Raises:
      httpx.HTTPError: the answer is not successful, or not JSON.
    """
    try:
        return answer.raise_for_status().json()
    except (ValueError, RecursionError):  # whatever its depth and bytes
        raise WrongAnswer(f"its answer is not JSON but {_brief(answer.text)}") from None


def field(answer: Any, path: str, kind: type[T]) -> T:
    """The value at a dotted path of an answer; the whole answer if the path is empty.

    Raises:
      WrongAnswer: it is missing or of another type. `True` is not a whole number, and text must be printable.
    """
    value = answer
    for name in filter(None, path.split(".")):
        value = value.get(name) if isinstance(value, dict) else None
    if type(value) is not kind or (isinstance(value, str) and not value.isprintable()):
        what = f"its answer's {path}" if path else "its answer"
        raise WrongAnswer(f"{what} is {_brief(value)}, no {_KINDS[kind]}")
    return value


def printable(text: str) -> str:
    """A server's text on one line, cut to length, with everything escaped that a terminal might obey."""
    line = " ".join(text[: 2 * MAX_QUOTED].split())
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    return shown[:MAX_QUOTED]


def backoff_seconds(attempt: int) -> float:
    """How long to wait before trying again, after `attempt` failures (counted from 1) in a row."""
    return min(0.5 * 2 ** (attempt - 1), MAX_BACKOFF_SECONDS)


def describe(error: Exception) -> str:
    """A phrase for what went wrong between us and a server; many of httpx's errors have no message."""
    match error:
        case WrongAnswer():
            return str(error)
        case httpx.ConnectError():
            return "it does not accept connections"
        case httpx.TimeoutException():
            return "it did not answer in time"
        case httpx.HTTPStatusError():
            return f"it answered {error.response.status_code}"
        case _:
            return f"the connection broke ({printable(str(error)) or type(error).__name__})"


async def wait_until_healthy(url: str, seconds: float, name: str, headers: Mapping[str, str] | None = None) -> None:
    """Returns once `url` answers 200; says on stderr that it is waiting if that takes longer than a moment.

    Raises:
      ServerError: the server did not answer so within `seconds`, or it wants another key.
    """
    start, announced, status = time.monotonic(), False, 0
    async with open_client(min(10.0, max(1.0, seconds))) as client:
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
