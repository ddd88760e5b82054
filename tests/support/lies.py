"""Invalid server responses: about generated tokens, weights and clusters, and at the level of HTTP."""

import asyncio
import functools
import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lying_servers import MAX_TOKENS, REPLY, VOCABULARY, Lie, changed, response

NAN, INFINITY = float("nan"), float("inf")
JUNK = [None, True, False, "", "1", "\x1b[31m", -1, 0, 7, 2.5, 10**30, NAN, INFINITY, [], {}, [1], [[]], {"a": 1}]
ESCAPES = "\x1b]0;owned\x07\x1b[31mred\r\n\u202egnihtyna"
MEGABYTE = b"0" * 2**20

INFO = "meta_info"
FIELDS: list[Sequence[str | int]] = [
    (),
    ("output_ids",),
    ("output_ids", 0),
    (INFO,),
    (INFO, "finish_reason"),
    (INFO, "finish_reason", "type"),
    (INFO, "prompt_tokens"),
    (INFO, "completion_tokens"),
    (INFO, "weight_version"),
    (INFO, "output_token_logprobs"),
    (INFO, "output_token_logprobs", 0),
    (INFO, "output_token_logprobs", 0, 0),
    (INFO, "output_token_logprobs", 0, 1),
]


def put(path: Sequence[str | int], value: Any, answer: Any) -> Any:
    """Sets the value at a path of a response body, and returns the body."""
    if not path:
        return value
    *way, last = path
    functools.reduce(lambda inner, name: inner[name], way, answer)[last] = value
    return answer


def remove(path: Sequence[str | int], answer: Any) -> Any:
    """Removes the value at a path of a response body, and returns the body."""
    *way, last = path
    del functools.reduce(lambda inner, name: inner[name], way, answer)[last]
    return answer


def rewritten(
    answer: Any, token_ids: list[Any], reason: str, logprobs: list[Any] | None = None, matched: Any = None
) -> Any:
    """Returns a response body with other tokens, in which all fields are consistent unless the arguments are not."""
    logprobs = [-1.0] * len(token_ids) if logprobs is None else logprobs
    entries = [[p, token, None] for p, token in zip(logprobs, token_ids, strict=True)]
    matched = matched or (token_ids[-1] if token_ids else 1)
    agreed = {"finish_reason": {"type": reason, "matched": matched}, "completion_tokens": len(token_ids)}
    return answer | {"output_ids": token_ids, INFO: answer[INFO] | agreed | {"output_token_logprobs": entries}}


DRAWS: dict[str, Callable[[Any], Any]] = {
    **{
        f"token {token}": lambda answer, token=token: rewritten(answer, [token, 1], "stop")
        for token in (VOCABULARY, VOCABULARY + 1, -1, 2**31, 2**32 + 3, -(2**31) - 1, 10**30, 3.0, "3", True, None, [3])
    },
    **{
        f"log-probability {p}": lambda answer, p=p: rewritten(answer, [3, 1], "stop", [-1.0, p])
        for p in (NAN, INFINITY, -INFINITY, 1e-3, 5.0, -1e300, -1e39, -1e5, "-1.0", None, True, [-1.0], 10**400)
    },
    "no tokens": lambda answer: rewritten(answer, [], "stop"),
    "no tokens, at length": lambda answer: rewritten(answer, [], "length"),
    "too many tokens": lambda answer: rewritten(answer, [3] * MAX_TOKENS + [1], "stop"),
    "far too many tokens": lambda answer: rewritten(answer, [3] * 10**4, "length"),
    "too few for length": lambda answer: rewritten(answer, [3] * (MAX_TOKENS - 1), "length"),
    "length before the end, with a stop token": lambda answer: rewritten(answer, [3, 1], "length"),
    "stop without a stop token": lambda answer: rewritten(answer, [3, 4], "stop"),
    "stop by a string": lambda answer: rewritten(answer, [3, 1], "stop", matched="NaN happened"),
    "stop by another token": lambda answer: rewritten(answer, [3, 1], "stop", matched=14),
    "on after a stop token": lambda answer: rewritten(answer, [1, 3, 1], "stop"),
    "on after a stop token, to length": lambda answer: rewritten(answer, [3, 14, 3, 3], "length"),
    "a reason that is none": lambda answer: rewritten(answer, [3, 1], "error"),
    "abort": lambda answer: rewritten(answer, [3, 1], "abort"),
    "other weights": lambda answer: put((INFO, "weight_version"), "other", answer),
    "weights of two versions": lambda answer: put(
        (INFO, "weight_versions"),
        [{"version": "other", "start": 0, "end": 1}, answer[INFO]["weight_versions"][0] | {"start": 1}],
        answer,
    ),
    "another weight version": lambda answer: put((INFO, "weight_versions", 0, "version"), "other", answer),
    "tokens without a weight version": lambda answer: put((INFO, "weight_versions", 0, "start"), 1, answer),
    "weight versions that are none": lambda answer: put((INFO, "weight_versions"), 5, answer),
    "another prompt": lambda answer: put((INFO, "prompt_tokens"), 99, answer),
    "one log-probability less": lambda answer: remove((INFO, "output_token_logprobs", 0), answer),
    "one token less": lambda answer: remove(("output_ids", 0), answer),
}


def lies_about_draws() -> Iterator[Lie]:
    """Yields responses in which the first completion is invalid, or the number of completions is wrong."""

    def first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Applies `change` to a single completion, or to the first one of a list."""
        return lambda honest: [change(honest[0]), *honest[1:]] if isinstance(honest, list) else change(honest)

    for name, change in DRAWS.items():
        yield changed(name, first(change))
    for path in FIELDS:
        name = ".".join(map(str, path)) or "answer"
        if path:
            yield changed(f"no {name}", first(functools.partial(remove, path)))
        for junk in JUNK:
            yield changed(f"{name}={junk!r:.20}", first(lambda one, path=path, junk=junk: put(path, junk, one)))
    yield changed("one answer less", lambda honest: honest[1:] if isinstance(honest, list) else [])
    yield changed(
        "one answer more", lambda honest: [honest, honest] if isinstance(honest, dict) else honest + honest[:1]
    )


def lies_about(*paths: Sequence[str | int]) -> Iterator[Lie]:
    """Yields responses in which the entire body, or one of these fields, is replaced by junk."""
    for path, junk in itertools.product(((), *paths), JUNK):
        name = ".".join(map(str, path)) or "answer"
        yield changed(f"{name}={junk!r:.20}", lambda honest, path=path, junk=junk: put(path, junk, honest))


def lies_about_clusters() -> Iterator[Lie]:
    """Yields replies of a judge with invalid clusters, or with a wrong number of verdicts."""
    content = ("choices", 0, "message", "content")
    for cluster in (0, 3, -1, 99, True, 1.0, "1", None, [1], 10**30):
        reply = {"1": REPLY["1"], "2": REPLY["2"] | {"cluster": cluster}}
        yield changed(f"cluster {cluster}", functools.partial(put, content, json.dumps(reply)))
    for name, reply in {"a verdict less": {"1": REPLY["1"]}, "a verdict more": REPLY | {"3": REPLY["1"]}}.items():
        yield changed(name, functools.partial(put, content, json.dumps(reply)))


def _sent(name: str, *pieces: bytes, pause: float = 0.0, hold: bool = False) -> Lie:
    """Sends `pieces` with a pause in seconds after each. If `hold` is True, the connection then stays open."""

    async def tell(honest: Any, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        if hold:
            await asyncio.sleep(60)

    return Lie(name, tell, slow=hold or pause > 0)


def _body(content: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"\r\n".join([b"HTTP/1.1 " + status, b"Content-Length: %d" % len(content), *headers])
    return head + b"\r\n\r\n" + content


def _cut(part: float, length: int) -> Lie:
    """Sends part of the valid body, with a Content-Length that exceeds it by `length` bytes."""

    async def tell(honest: Any, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(honest).encode()
        kept = body[: int(part * len(body))]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(kept) + length, kept))

    return Lie(f"{part:.0%} of the body, {length} bytes missing", tell)


def _encoded(encoding: bytes) -> Lie:
    """Sends a well-formed body with a content encoding that was not requested."""
    return _sent(f"encoding {encoding!r}", _body(gzip.compress(b"{}"), b"Content-Encoding: " + encoding))


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@functools.cache
def lies_about_http() -> tuple[Lie, ...]:
    """Returns responses that violate HTTP or have unexpected bodies. Slow ones are last."""
    bomb = gzip.compress(MEGABYTE * 300, 1)
    statuses = (204, 206, 300, 302, 304, 307, 400, 401, 403, 404, 408, 413, 418, 429, 500, 502, 503, 504, 599)
    return (
        *(_sent(f"status {code}", _body(b"busy", status=b"%d no" % code)) for code in statuses),
        *(_sent(f"status {code} and escapes", response(code, 0)[:-1] + ESCAPES.encode()) for code in (400, 500)),
        *(_sent(f"{name} {code}", _body(content, status=b"%d x" % code)) for code in (200, 400) for name, content in {
            "escapes": ESCAPES.encode(),
            "no JSON": b"<html>busy</html>",
            "nothing": b"",
            "half a string": b'{"a": "',
            "nesting": b"[" * 10**5,
            "a long number": b"1" * 10**5,
            "bytes that are no text": bytes(range(256)),
            "surrogates": b'"\\ud800\\ud800"',
            "UTF-16": '{"a": 1}'.encode("utf-16"),
            "zeros": b"\0" * 1000,
        }.items()),
        *(_cut(part, length) for part in (0.0, 0.3, 0.99, 1.0) for length in (0, 1, 10**6) if part < 1 or length),
        *(_encoded(name) for name in (b"gzip", b"deflate", b"br", b"zstd", b"x-unknown", b"gzip, gzip, gzip")),
        *(_sent(f"charset {name}", _body(b"\xff{", b"Content-Type: text/plain; charset=" + name.encode()))
          for name in ("zlib", "base64", "rot13", "idna", "utf-7", "\x1b[31m")),
        _sent("redirect to itself", _body(b"", b"Location: /generate", status=b"302 Found")),
        _sent("redirect to a file", _body(b"", b"Location: file:///etc/passwd", status=b"302 Found")),
        _sent("redirect to nowhere", _body(b"", b"Location: http://[:::", status=b"302 Found")),
        _sent("escapes in the status", b"HTTP/1.1 500 \x1b[31mred\r\nContent-Length: 0\r\n\r\n"),
        _sent("no HTTP", b"SSH-2.0-OpenSSH_9.6\r\n"),
        _sent("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        _sent("escapes in place of HTTP", ESCAPES.encode()),
        _sent("closed at once"),
        _sent("negative length", b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}"),
        _sent("two lengths", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 2\r\n\r\n{}"),
        _sent("chunks that are none", CHUNKED, b"zz\r\n{}\r\n0\r\n\r\n"),
        _sent("a chunk too long", CHUNKED, b"ffffffffffffffff\r\n{}"),
        _sent("chunks that break off", CHUNKED, b"2\r\n{}\r\n"),
        _sent("many cookies", _body(b"busy", *[b"Set-Cookie: a%d=b; Path=/" % i for i in range(500)])),
        _sent("endless headers", b"HTTP/1.1 200 OK\r\n", *[b"X: %s\r\n" % MEGABYTE] * 20),
        _sent("gzip bomb", _body(bomb, b"Content-Encoding: gzip")),
        _sent("endless body", CHUNKED, *[b"100000\r\n" + MEGABYTE + b"\r\n"] * 300),
        _sent("no answer", hold=True),
        _sent("head without body", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", hold=True),
        _sent("endless interim answers", *[b"HTTP/1.1 100 Continue\r\n\r\n"] * 1000, pause=0.02),
        _sent("dripping body", CHUNKED, *[b"1\r\n \r\n"] * 1000, pause=0.02),
        _sent("dripping head", *[b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n"] * 1000], pause=0.02),
    )  # fmt: skip
