"""Judge that clusters responses with a language model on an OpenAI-compatible server (paper §4 and appendix)."""

import asyncio
import collections
import contextlib
import hashlib
import json
import math
import os
import re
import sys
import time
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx

from poly_epo_jax.config.checks import Range
from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.judges.prompt import build_messages, load_rubric, reply_schema, rubric_file
from poly_epo_jax.judges.reply import ReplyError, read_clustering, read_context, read_model_name
from poly_epo_jax.system.digests import file_digests
from poly_epo_jax.system.http_client import (
    InvalidResponseError,
    ServerError,
    backoff_seconds,
    describe_error,
    open_client,
    proxy_of,
    quote,
    wait_until_healthy,
)
from poly_epo_jax.types import CapacityChecked, Clustering, Group, Judge, JudgeFailure, JudgeLoad, Task

VERSION = re.compile(r"/v[0-9]\w*/")
RETRIED = ("unavailable", "truncated", "malformed")
"""Kinds of failures after which the request is retried."""


class LLMJudge:
    """Clusters the N responses of a prompt with one chat completion, whose format is constrained by a JSON schema.

    Every reply is validated. All errors result in a JudgeFailure of one of these kinds:

      unreachable  The server did not accept connections for `judge.wait_seconds`.
      refused      The server responded with a permanent error.
      unavailable  The server responded with status 429 or 5xx or did not respond in time, or the connection failed. The
                   request is retried after a delay.
      truncated    The reply is incomplete. The request is retried with another seed.
      malformed    The reply does not match the schema. The request is retried with another seed.

    Args:
      task: Task of the run. Not used.
      section: Section `judge` of the configuration: URL, model, API key and request limits. "/v1" is appended to the
        URL unless its path contains another API version, such as Gemini's /v1beta/openai.
      temperature: Sampling temperature of the judge.
      max_tokens: Maximum number of tokens of a reply. Each response takes about 50 tokens, for a rationale of 120
        characters and the JSON around it.
      attempts: Maximum number of requests per prompt, including the first.
      prompt_file: Path of a text file that replaces the rubric, in which `{num_responses}` stands for N. If empty, the
        rubric of the package is used.
      max_response_chars: Maximum number of characters per response. Longer responses are shortened in the middle.
      context_tokens: Maximum number of tokens of prompt and reply. 0 uses the value listed by the server, if any.

    Raises:
      ValueError: If the prompt file does not exist or is not UTF-8 text, or if the environment variable of the API key
        does not contain a valid key, or if HTTPS_PROXY selects a proxy that does not use HTTP.
    """

    def __init__(
        self,
        task: Task,
        section: JudgeSection,
        *,
        temperature: Annotated[float, Range(0, 2)] = 0.7,
        max_tokens: Annotated[int, Range(1, 2**20)] = 2048,
        attempts: Annotated[int, Range(1, 100)] = 3,
        prompt_file: str = "",
        max_response_chars: Annotated[int, Range(2, 10**7)] = 20_000,
        context_tokens: Annotated[int, Range(0, 2**30)] = 0,
    ):
        self.url, self.model, self._section = section.url.rstrip("/"), section.model, section
        self._temperature, self._max_tokens, self._attempts = temperature, max_tokens, attempts
        self._max_response_chars, self._context_tokens = max_response_chars, context_tokens
        self._api = self.url if VERSION.search(urlsplit(self.url).path + "/") else f"{self.url}/v1"
        self._rubric = load_rubric(prompt_file)
        (self._rubric_digest,) = file_digests([rubric_file(prompt_file)])
        self._listed_model, self._key = "", _read_key(section.api_key_env)
        self._proxy = proxy_of(self.url) if self._key else ""
        self._unreachable_since: float | None = None
        self._counts = collections.Counter[str]()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        """Requests a clustering, with a rationale for each response. Returns the last failure if all attempts fail."""
        responses = [generation.text for generation in group.generations]
        schema = {"name": "clusters", "schema": reply_schema(len(responses)), "strict": True}
        messages, num_shortened = build_messages(
            self._rubric, group.problem.prompt, responses, self._max_response_chars
        )
        self._counts["shortened_responses"] += num_shortened
        request = {
            "messages": messages,
            "response_format": {"type": "json_schema", "json_schema": schema},
            "temperature": self._temperature,
            "max_tokens": self._max_tokens,
        }
        async with self._slot(), self._open_client() as client:
            attempt = 1
            while True:
                outcome = await self._attempt(client, request | {"seed": _seed(group, attempt)}, len(responses))
                if isinstance(outcome, Clustering) or outcome.kind not in RETRIED or attempt == self._attempts:
                    return outcome
                if outcome.kind == "unavailable":
                    await asyncio.sleep(backoff_seconds(attempt))
                attempt += 1
                self._counts["retries"] += 1

    async def wait_until_ready(self) -> None:
        """Waits until the server responds.

        Raises:
          ServerError: If the server does not respond within `judge.wait_seconds`, or if it rejects the API key.
        """
        try:
            await wait_until_healthy(
                f"{self._api}/models", self._section.wait_seconds, f"Judge {self.url}", self._headers(), self._proxy
            )
        except ServerError as error:
            raise ServerError(self._without_key(str(error))) from None

    async def identity(self) -> dict[str, str]:
        """Returns the name of the model, which the server lists if `judge.model` is empty, and the rubric's digest.

        Raises:
          ServerError: If the server does not respond, or does not list a model.
        """
        try:
            async with self._open_client() as client:
                model = await self._model_name(client)
        except (ReplyError, httpx.HTTPError) as error:
            reason = describe_error(error) if isinstance(error, httpx.HTTPError) else error
            text = f"Failed to get the model name of the judge at {self.url}: {reason}. Set judge.model."
            raise ServerError(self._without_key(text)) from None
        return {"judge.model": model, "judge.options.prompt_file": self._rubric_digest}

    async def capacity_warnings(self, load: JudgeLoad) -> list[str]:
        """Returns one sentence per limit of the judge that the load exceeds: its context, or the length of a reply."""
        context = self._context_tokens
        if not context:
            with contextlib.suppress(httpx.HTTPError, ReplyError):  # the first prompt reports the error
                async with self._open_client() as client:
                    context = read_context(await self._send(client, "GET", "/models"), self.model)
        return capacity_warnings(load, self._rubric, self._max_response_chars, self._max_tokens, context)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of retried requests and of shortened responses since the last call."""
        counts, self._counts = self._counts, collections.Counter[str]()
        return {f"judge/{name}": float(counts[name]) for name in ("retries", "shortened_responses")}

    def _open_client(self) -> httpx.AsyncClient:
        return open_client(self._section.timeout_seconds, proxy=self._proxy)

    async def _model_name(self, client: httpx.AsyncClient) -> str:
        if not (self.model or self._listed_model):
            self._listed_model = read_model_name(await self._send(client, "GET", "/models"))
        return self.model or self._listed_model

    async def _attempt(
        self, client: httpx.AsyncClient, request: dict[str, Any], num_responses: int
    ) -> Clustering | JudgeFailure:
        try:
            request = {"model": await self._model_name(client), **request}
            return read_clustering(await self._send(client, "POST", "/chat/completions", request), num_responses)
        except ReplyError as error:
            kind, reason = error.kind, str(error)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            proxy = ", or the proxy in HTTPS_PROXY" if self._proxy else ""
            kind, reason = "unreachable", f"{describe_error(error)}; start the server, or correct judge.url{proxy}"
        except httpx.HTTPStatusError as error:
            kind, reason = self._refusal(error.response)
        except httpx.HTTPError as error:
            kind = "malformed" if isinstance(error, InvalidResponseError) else "unavailable"
            reason = describe_error(error)
        return JudgeFailure(kind, self._without_key(f"The judge at {self.url}: {reason}."))

    async def _send(
        self, client: httpx.AsyncClient, method: str, path: str, payload: dict[str, Any] | None = None
    ) -> bytes:
        """Returns the body of a successful response. All prompts share one wait for an unreachable server."""
        failures = 0
        while True:
            try:
                response = await client.request(method, f"{self._api}{path}", json=payload, headers=self._headers())
            except (httpx.ConnectError, httpx.ConnectTimeout):
                now, failures = time.monotonic(), failures + 1
                self._unreachable_since = self._unreachable_since or now
                left = self._unreachable_since + self._section.wait_seconds - now
                if left <= 0:
                    raise
                await asyncio.sleep(min(backoff_seconds(failures), left))
            else:
                self._unreachable_since = None
                return response.raise_for_status().content

    def _refusal(self, response: httpx.Response) -> tuple[str, str]:
        status = response.status_code
        # The key is removed before the text is shortened, because shortening could leave a part of the key.
        reason = f"HTTP status {status}: {quote(self._without_key(response.text))}"
        if status in (401, 403):
            variable = f"the environment variable {self._section.api_key_env}" if self._key else "judge.api_key_env"
            reason = f"HTTP status {status}; check {variable}"
        return "unavailable" if status == 429 or status >= 500 else "refused", reason

    def _slot(self) -> asyncio.Semaphore:
        """Returns the semaphore of the current event loop, because a semaphore belongs to one loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._section.max_concurrent)
        return self._slots[1]

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


def _read_key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    # If the key is invalid in a header, the error message of httpx would contain the key.
    if not key or not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"The environment variable {variable} (judge.api_key_env) does not contain a valid API key; set it, or "
            "leave judge.api_key_env empty for a server without keys."
        )
    return key


def _seed(group: Group, attempt: int) -> int:
    """Returns a seed that depends on the group and the attempt only. It has 31 bits, which all servers accept."""
    words = json.dumps([group.problem.id, [one.weight_version for one in group.generations], attempt]).encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:4]) >> 1


CHARS_PER_TOKEN = 3
"""Characters per token of mathematical text. Qwen3's tokenizer has 2.98 on 3,000 problems and on the rubric."""
TOKENS_PER_VERDICT = 50
"""Tokens of a reply per response: about 30 for a rationale of 120 characters, and 17 for the JSON around it."""
TOKENS_PER_FRAME = 50
"""Tokens of the two delimiter lines of each text in a request."""


async def warn_capacity(judge: Judge, load: JudgeLoad) -> None:
    """Prints a warning to stderr for each limit of the judge that a request of this size would exceed.

    Args:
      judge: The judge. Judges without limits never cause warnings.
      load: Size of the largest request.
    """
    if isinstance(judge, CapacityChecked):
        for shortfall in await judge.capacity_warnings(load):
            print(f"Warning: {shortfall}", file=sys.stderr)


def capacity_warnings(
    load: JudgeLoad, rubric: str, max_response_chars: int, max_tokens: int, context: int
) -> list[str]:
    """Estimates the size of a request and its reply, and compares them with the limits of the judge.

    Args:
      load: Size of the request.
      rubric: Text of the system message.
      max_response_chars: Maximum number of characters per response. Longer responses are shortened.
      max_tokens: Maximum number of tokens of a reply.
      context: Maximum number of tokens of prompt and reply. 0 means unknown; the prompt is then not checked.

    Returns:
      One sentence per exceeded limit.
    """
    found, responses = [], load.num_responses
    reply = responses * TOKENS_PER_VERDICT
    if reply > max_tokens:
        found.append(
            f"The judge's reply for {responses} responses takes about {reply} tokens, which exceeds "
            f"judge.options.max_tokens={max_tokens}; raise it, or lower the number of generations per prompt."
        )
    longest = min(load.response_tokens, math.ceil(max_response_chars / CHARS_PER_TOKEN))
    texts = load.prompt_tokens + responses * longest + (1 + responses) * TOKENS_PER_FRAME
    needed = math.ceil(len(rubric) / CHARS_PER_TOKEN) + texts + max_tokens
    if 0 < context < needed:
        found.append(
            f"{responses} responses of {longest} tokens each, the rubric and the reply take about {needed} tokens, "
            f"which exceeds the judge's context of {context}; raise the context length of the server, or lower "
            "judge.options.max_response_chars."
        )
    return found
