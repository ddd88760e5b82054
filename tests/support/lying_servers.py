"""A server on a real socket that responds like SGLang, its router or a judge, except for one invalid response."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

VOCABULARY, STOP_IDS, MAX_TOKENS = 32, (1, 14), 4
REPLY = {str(number): {"rationale": "Macro: count", "cluster": 1} for number in (1, 2)}

Tell = Callable[[Any, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Lie:
    """An invalid response.

    Attributes:
      name: Description of the response.
      tell: Coroutine function that takes the valid response body and writes the invalid response to the connection,
        which is closed afterwards.
      slow: Whether the response lasts until the client closes the connection.
    """

    name: str
    tell: Tell
    slow: bool = False


def changed(name: str, change: Callable[[Any], Any]) -> Lie:
    """Returns a `Lie` whose response body is `change` applied to the valid one."""

    async def tell(honest: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, change(json.loads(json.dumps(honest)))))

    return Lie(name, tell)


def response(status: int, answer: Any) -> bytes:
    """Encodes an HTTP response with a JSON body."""
    body = json.dumps(answer).encode()
    return b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def drawn(seed: int) -> tuple[list[int], list[float]]:
    """Returns random tokens and log-probabilities of a seed. Half of all responses have the maximum length."""
    random = np.random.default_rng(seed)
    stops = bool(random.integers(2))
    count = int(random.integers(1, MAX_TOKENS + 1)) if stops else MAX_TOKENS
    token_ids = random.integers(8, 14, count).tolist()  # These token ids do not occur in JUNK of lies.py.
    if stops:
        token_ids[-1] = 1
    return token_ids, (-random.exponential(size=count)).tolist()


class LyingServer:
    """A server that responds with `lie` to the first `times` requests for `path`, and correctly otherwise."""

    def __init__(self) -> None:
        self.lie: Lie | None = None
        self.path, self.times, self.is_router = "/generate", 0, False
        self.url, self.version = "", "initial"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Runs the server on a free port, and sets `url`."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                size = next((int(line[15:]) for line in head.lower().splitlines() if line[:15] == "content-length:"), 0)
                body = json.loads(await reader.readexactly(size) or b"{}")
                status, answer = self._honest(method, path, body)
                if self.lie is not None and self.times > 0 and f"{method} {path}".endswith(self.path):
                    self.times -= 1
                    await self.lie.tell(answer, writer)
                    await writer.drain()
                    break
                writer.write(response(status, answer))
                await writer.drain()
        writer.close()

    def _honest(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", "/v1/models":
                return 200, {"data": [{"id": "judge"}]}
            case _, "/workers":
                worker = {"id": "worker-0", "url": self.url, "model_id": "m"}
                return (200, {"workers": [worker]}) if self.is_router else (404, {})
            case "GET", "/update_weights_from_disk":
                return 405, {}
            case "GET", "/model_info":
                return 200, {"model_path": "m", "tokenizer_path": "m", "weight_version": self.version}
            case "GET", "/server_info":
                return 200, {"quantization": None}
            case "POST", "/weights_checker":
                return 200, {"success": True, "ranks": [{"checksums": {"norm": "ab" * 8}}]}
            case "POST", "/update_weights_from_disk":
                self.version = body["weight_version"]
            case "POST", "/generate":
                return 200, self._generate(body)
            case "POST", "/v1/chat/completions":
                message = {"role": "assistant", "content": json.dumps(REPLY)}
                return 200, {"choices": [{"finish_reason": "stop", "message": message}]}
        return 200, {"success": True}

    def _generate(self, body: Any) -> Any:
        parameters, prompts = body["sampling_params"], body["input_ids"]
        if not isinstance(parameters, list):
            return self.answer(parameters["sampling_seed"], prompts, parameters["max_new_tokens"])
        return [self.answer(one["sampling_seed"], ids) for one, ids in zip(parameters, prompts, strict=True)]

    def answer(self, seed: int, prompt_ids: list[int], max_tokens: int = MAX_TOKENS) -> Any:
        """Returns the response of SGLang for one seed and prompt, with at most `max_tokens` tokens."""
        token_ids, logprobs = (values[:max_tokens] for values in drawn(seed))
        stopped = token_ids[-1] in STOP_IDS
        reason = {"type": "stop", "matched": token_ids[-1]} if stopped else {"type": "length", "length": MAX_TOKENS}
        info = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(token_ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(token_ids)}],
            "output_token_logprobs": [[p, token, None] for p, token in zip(logprobs, token_ids, strict=True)],
        }
        return {"text": "", "output_ids": token_ids, "meta_info": info}
