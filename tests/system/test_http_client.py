"""Responses are complete, bounded and unencoded, or raise an error. fuzz/servers.py tests further invalid responses."""

import asyncio
import contextlib
import gzip
from collections.abc import Sequence
from email.utils import formatdate
from types import SimpleNamespace

import httpx
import pytest

from poly_epo_jax.system import http_client
from poly_epo_jax.system.http_client import (
    InvalidResponseError,
    describe_error,
    field,
    open_client,
    quote,
    read_json,
    retry_after_seconds,
)

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def fetch(
    pieces: Sequence[bytes], *, seconds: float = 60.0, max_bytes: int = 10**6, drip: bool = False
) -> httpx.Response:
    """Returns the response to these bytes from a real socket. If `drip` is True, the last piece repeats forever."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
            while drip:
                await asyncio.sleep(0.01)
                writer.write(pieces[-1])
                await writer.drain()
        writer.close()

    async def request() -> httpx.Response:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, open_client(seconds, max_bytes) as client:
            return await client.get(f"http://{host}:{port}/")

    return asyncio.run(request())


@pytest.mark.parametrize("pieces", [[CHUNKED, b"1\r\n \r\n"], [HEAD, b"X: y\r\n"], [b"HTTP/1.1 100 Continue\r\n\r\n"]])
def test_the_timeout_applies_to_the_complete_response(pieces: list[bytes]):
    with pytest.raises(httpx.ReadTimeout) as caught:
        fetch(pieces, seconds=0.2, drip=True)
    assert describe_error(caught.value) == "it did not respond in time"


def test_an_endless_response_is_rejected():
    with pytest.raises(InvalidResponseError, match="longer than 100000 bytes"):
        fetch([CHUNKED, b"400\r\n" + b" " * 1024 + b"\r\n"], max_bytes=10**5, drip=True)


def test_responses_are_not_decompressed():
    bomb = gzip.compress(b" " * 10**6)
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    with pytest.raises(InvalidResponseError, match="a content encoding, which was not requested"):
        fetch([head, bomb])


def test_headers_do_not_affect_how_a_body_is_read():
    headers = b"Content-Type: text/plain; charset=zlib\r\nSet-Cookie: a=b\r\nContent-Length: 3\r\n\r\n"
    found = fetch([HEAD + headers + b"\xff12"])
    assert found.text == "\ufffd12" and not found.cookies
    with pytest.raises(InvalidResponseError, match="is not JSON"):
        read_json(found)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("20", 20), ("0.5", 0.5), ("", 0), ("-1", 0), ("nan", 0), ("soon", 0), ("9" * 400, 0), ("\xff", 0), ("\u0663", 0)],
)
def test_the_delay_that_a_server_requests_is_read(value: str, seconds: float):
    found = fetch([HEAD + b"retry-AFTER: " + value.encode("utf-8") + b"\r\nContent-Length: 0\r\n\r\n"])
    assert retry_after_seconds(found) == seconds


def test_the_delay_that_a_server_requests_can_be_a_date(monkeypatch: pytest.MonkeyPatch):
    now = 1_700_000_000.0
    monkeypatch.setattr(http_client, "time", SimpleNamespace(time=lambda: now))

    def delay(timestamp: float) -> float:
        header = formatdate(timestamp, usegmt=True).encode()
        return retry_after_seconds(fetch([HEAD + b"Retry-After: " + header + b"\r\nContent-Length: 0\r\n\r\n"]))

    assert delay(now + 3600) == 3600
    assert delay(now - 3600) == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 10**5, b"1" * 10**5, b"\xff\xfe"])
def test_invalid_json_is_a_wrong_answer(body: bytes):
    with pytest.raises(InvalidResponseError, match="is not JSON"):
        read_json(fetch([HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body]))


@pytest.mark.parametrize(
    ("path", "kind", "complaint"),
    [
        ("a.b", float, r"^a\.b .* is 1, not a float"),
        ("a.c", int, r"^a\.c .* is True, not an integer"),
        ("a.d", str, r"^a\.d .* is None, not a printable string"),
        ("e.f", str, r"^e\.f .* is None, not a printable string"),
        ("e", str, r"^e .* is '\\x1b\[31m', not a printable string"),
        ("", list, r"is \{.*\}, not a list"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(path: str, kind: type, complaint: str):
    found = {"a": {"b": 1, "c": True}, "e": "\x1b[31m"}
    assert field(found, "a.b", int) == 1
    with pytest.raises(InvalidResponseError, match=complaint):
        field(found, path, kind)


def test_control_characters_from_a_server_are_escaped():
    assert quote(" \x1b[31m red\r\n\u202eno\ud800\x00 ") == "\\x1b[31m red \\u202eno\\ud800\\x00"
    assert len(quote("a" * 10**4)) == len(quote("\0" * 10**4)) == http_client.MAX_QUOTED
