"""HTTP client utilities: limits on response time and size, field-by-field validation, and retry backoff.

An invalid response raises InvalidResponseError. It is an httpx error, so that code that retries after a connection
error also retries after an invalid response. Error messages are clauses that complete a message with the server's
address.
"""

import asyncio
import functools
import ipaddress
import re
import sys
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from reprlib import repr as _brief
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass_environment  # pyright: ignore[reportAttributeAccessIssue]

import httpx

T = TypeVar("T")

MAX_BACKOFF_SECONDS = 20.0
MAX_BYTES = 10**7
"""Default limit of the response size. Parsed as Python objects, a response takes up to 30 times as much memory."""
_PROXY = re.compile(r"https?://([^\s/?#]*@)?([\w.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?/*", re.IGNORECASE)
MAX_QUOTED = 500  # maximum number of characters of a response that an error message quotes

_KINDS: dict[type, str] = {
    str: "a printable string",
    int: "an integer",
    float: "a float",
    list: "a list",
    dict: "an object",
}


class ServerError(ConnectionError):
    """Raised when a server cannot be used. The message contains its address and the remedy."""


class RequestError(ServerError):
    """Raised when a single request has failed finally. The servers can still be used for other requests."""


class InvalidResponseError(httpx.HTTPError):
    """Raised when a response is invalid. The message names the invalid field."""


class _BoundedTransport(httpx.AsyncBaseTransport):
    """Transport with limits on the time and size of complete responses.

    Timeouts of httpx apply to each chunk of a response; `seconds` applies to the complete response. Response headers
    except Retry-After are dropped, so that they cannot trigger decompression, decoding or redirects.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, seconds: float, max_bytes: int):
        self._transport, self._seconds, self._max_bytes = transport, seconds, max_bytes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            async with asyncio.timeout(self._seconds):
                response = await self._transport.handle_async_request(request)
                try:
                    return httpx.Response(
                        response.status_code,
                        headers=[header for header in response.headers.raw if header[0].lower() == b"retry-after"],
                        content=await self._read(response),
                    )
                finally:
                    await response.aclose()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no complete response within {self._seconds:g} s") from None

    async def _read(self, response: httpx.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InvalidResponseError("its response has a content encoding, which was not requested")
        pieces, size = [], 0
        assert isinstance(response.stream, httpx.AsyncByteStream)
        async for piece in response.stream:
            pieces.append(piece)
            size += len(piece)
            if size > self._max_bytes:
                raise InvalidResponseError(f"its response is longer than {self._max_bytes} bytes")
        return b"".join(pieces)

    async def aclose(self) -> None:
        await self._transport.aclose()


_certificates = functools.cache(httpx.create_ssl_context)  # loading the certificates takes longer than a request


def proxy_of(url: str) -> str:
    """Returns the proxy that the environment variables HTTPS_PROXY and NO_PROXY select for a hosted service.

    Args:
      url: Address of the service.

    Returns:
      The address of the proxy, which may contain a password. It is empty for unencrypted and local addresses.

    Raises:
      ValueError: If the proxy does not use HTTP, or its address is invalid.
    """
    scheme, host, port = urlsplit(url).scheme, urlsplit(url).hostname or "", urlsplit(url).port or 443
    proxies = {name: value.strip() for name, value in getproxies().items()}
    proxy = proxies.get("https") or proxies.get("all") or ""
    # `proxy_bypass_environment` reads neither blanks between names nor *.NAME.
    excluded = re.sub(r"\*\.", ".", proxies.get("no", "")).replace(",", " ").split()
    if (
        not proxy
        or scheme != "https"
        or _is_local(host)
        or "*" in excluded
        or proxy_bypass_environment(f"{host}:{port}", {"no": ",".join(excluded)})
    ):
        return ""
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    match = _PROXY.fullmatch(proxy)
    if match is None or int(match["port"] or 80) > 65_535:
        raise ValueError(
            f"HTTPS_PROXY selects a proxy for {url} whose type {proxy.partition('://')[0][:20]!r} or address is not "
            "supported; set it to http://HOST:PORT, or add the host to NO_PROXY."
        )
    return proxy


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_private
    except ValueError:
        return False


def open_transport(proxy: str = "") -> httpx.AsyncBaseTransport:
    """Creates a transport for an unlimited number of concurrent requests, through a proxy if one is given."""
    return httpx.AsyncHTTPTransport(
        verify=_certificates(),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
        proxy=proxy or None,
    )


def open_client(timeout_seconds: float, max_bytes: int = MAX_BYTES, proxy: str = "") -> httpx.AsyncClient:
    """Creates a client for an unlimited number of concurrent requests.

    Args:
      timeout_seconds: Maximum time of a complete response, in seconds.
      max_bytes: Maximum size of a response, in bytes.
      proxy: Address of a proxy, from `proxy_of`. If empty, requests are sent directly, because the addresses of the
        policy's servers are not accessible to proxies.
    """
    return httpx.AsyncClient(
        transport=_BoundedTransport(open_transport(proxy), timeout_seconds, max_bytes),
        timeout=httpx.Timeout(None, connect=10.0),
        headers={"Accept-Encoding": "identity"},
        trust_env=False,
    )


def read_json(response: httpx.Response) -> Any:
    """Returns the JSON content of a response.

    Raises:
      httpx.HTTPError: If the status is not successful or the content is not JSON.
    """
    try:
        return response.raise_for_status().json()
    except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
        raise InvalidResponseError(f"its response is not JSON: {_brief(response.text)}") from None


def field(response: Any, path: str, kind: type[T]) -> T:
    """Returns a field of a parsed response.

    Args:
      response: The parsed response.
      path: Names of nested fields, separated by dots. If empty, the complete response is returned.
      kind: Required type. A bool is not an int, and strings must be printable.

    Returns:
      The value of the field.

    Raises:
      InvalidResponseError: If the field is missing or has another type.
    """
    value = response
    for name in filter(None, path.split(".")):
        value = value.get(name) if isinstance(value, dict) else None
    if type(value) is not kind or (isinstance(value, str) and not value.isprintable()):
        subject = f"{path} of its response" if path else "its response"
        raise InvalidResponseError(f"{subject} is {_brief(value)}, not {_KINDS[kind]}")
    return value


def quote(text: str) -> str:
    """Formats a server's text on one line of at most MAX_QUOTED characters, with control characters escaped."""
    line = " ".join(text[: 2 * MAX_QUOTED].split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)[:MAX_QUOTED]


def backoff_seconds(attempt: int) -> float:
    """Returns the delay in seconds before the next attempt, after `attempt` consecutive failures (at least 1)."""
    return min(0.5 * 2 ** (attempt - 1), MAX_BACKOFF_SECONDS)


def retry_after_seconds(response: httpx.Response) -> float:
    """Returns the delay in seconds that the header Retry-After requests, or 0 if it is missing, past or invalid."""
    value = response.headers.get("retry-after", "")
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def describe_error(error: Exception) -> str:
    """Describes a connection error or invalid response in a clause, because many httpx errors have no message."""
    match error:
        case InvalidResponseError():
            return str(error)
        case httpx.ConnectError():
            reason = quote(str(error))  # such as an unknown host name, or a certificate that is not trusted
            is_specific = reason not in ("", "All connection attempts failed")
            return f"it does not accept connections{f' ({reason})' if is_specific else ''}"
        case httpx.TimeoutException():
            return "it did not respond in time"
        case httpx.HTTPStatusError():
            return f"it answered {error.response.status_code}"
        case _:
            return f"the connection failed ({quote(str(error)) or type(error).__name__})"


async def wait_until_healthy(
    url: str,
    seconds: float,
    name: str,
    headers: Mapping[str, str] | None = None,
    proxy: str = "",
    required: bool = True,
) -> None:
    """Waits until a health endpoint responds with a success status. Prints a message to stderr if it has to wait.

    Args:
      url: The health endpoint.
      seconds: Maximum waiting time in seconds.
      name: Name of the server in messages.
      headers: Request headers, for example an API key.
      proxy: Address of a proxy, from `proxy_of`.
      required: Whether the server must have the endpoint. If False, any response except a server error or a rejected
        API key (status 401) shows that the server is healthy.

    Raises:
      ServerError: If the server does not become healthy within `seconds`, or if it rejects the API key.
    """
    start, announced, status = time.monotonic(), False, 0
    async with open_client(min(10.0, max(1.0, seconds)), proxy=proxy) as client:
        while True:
            try:
                response = await client.get(url, headers=headers)
                status = response.status_code
                if required or status == 401 or status >= 500:
                    response.raise_for_status()
            except httpx.HTTPError as error:
                problem = describe_error(error)
            else:
                if announced:
                    print(f"{name} is ready.", file=sys.stderr)
                return
            waited = time.monotonic() - start
            is_rejected = status in (401, 403)
            if waited >= seconds or is_rejected:
                limit = f" within {seconds:g} s" if seconds and not is_rejected else ""
                raise ServerError(
                    f"{name} did not become healthy{limit}: GET {url}: {problem}; start it, or correct its address or "
                    "key."
                )
            if not announced:
                announced = True
                print(f"Waiting up to {seconds:g} s for {name} (GET {url}: {problem}) ...", file=sys.stderr)
            await asyncio.sleep(min(1.0, seconds - waited))
