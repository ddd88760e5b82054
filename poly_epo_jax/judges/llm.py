"""The judge that reads the responses: a language model behind an OpenAI-compatible server (paper §4 and appendix)."""

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
from poly_epo_jax.judges.prompt import build_messages, load_rubric, reply_schema
from poly_epo_jax.judges.reply import ReplyError, read_clustering, read_context, read_model_name
from poly_epo_jax.system.http_client import (
    ServerError,
    WrongAnswer,
    backoff_seconds,
    describe,
    open_client,
    printable,
    wait_until_healthy,
)
from poly_epo_jax.types import Clustering, Group, Judge, JudgeFailure, JudgeLoad, Limited, Task

VERSION = re.compile(r"/v[0-9]\w*/")
RETRIED = ("unavailable", "truncated", "malformed")
"""Kinds of failure after which the judge is asked again."""


class LLMJudge:
    """Clusters the N responses of a prompt with one chat completion, whose form a JSON schema prescribes.

    Every reply is checked, and whatever goes wrong becomes a JudgeFailure, never a clustering. Its kinds are

      unreachable  the server accepted no connections for `wait_seconds`
      refused      it answered with an error that it would repeat
      unavailable  it answered 429 or 5xx, or too late, or the connection broke; asked again after a delay
      truncated    the reply is incomplete; asked again with another seed
      malformed    the reply is not what was asked for; asked again with another seed

    Args:
      section: the judge's server: its address without the /v1 that every path begins with (a path that names another
        version of the API, such as Gemini's /v1beta/openai, replaces it), its model, its key, and limits on requests.
      temperature: the judge's sampling temperature.
      max_tokens: the longest reply; a response takes about 50, a rationale of 120 characters and the text around it.
      attempts: how many requests to make for one prompt, in total, until a reply is well-formed.
      prompt_file: a text that replaces the rubric, in which `{num_responses}` stands for N; "": the one shipped here.
      max_response_chars: the judge reads only this many characters of a longer response, from its beginning and end.
      context_tokens: how many tokens prompt and reply may take together; 0: what the server lists, if it does.

    Raises:
      ValueError: there is no such file, or the key's environment variable is not set.
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
        self._key = _read_key(section.api_key_env)
        self._listed_model = ""
        self._unreachable_since: float | None = None
        self._counts = collections.Counter[str]()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        """Which responses share a strategy, with a rationale for each; or why that could not be determined."""
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
        async with self._slot(), open_client(self._section.timeout_seconds) as client:
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
        """Returns once the server answers.

        Raises:
          ServerError: it did not answer within `wait_seconds`.
        """
        try:
            await wait_until_healthy(
                f"{self._api}/models", self._section.wait_seconds, f"Judge {self.url}", self._headers()
            )
        except ServerError as error:
            raise ServerError(self._without_key(str(error))) from None

    async def shortfalls(self, load: JudgeLoad) -> list[str]:
        """Which parts of the load would not fit into the judge's context, or its verdicts into a reply."""
        context = self._context_tokens
        if not context:
            with contextlib.suppress(httpx.HTTPError, ReplyError):  # the first prompt will report what is wrong
                async with open_client(self._section.timeout_seconds) as client:
                    context = read_context(await self._send(client, "GET", "/models"), self.model)
        return shortfalls(load, self._rubric, self._max_response_chars, self._max_tokens, context)

    def metrics(self) -> dict[str, float]:
        """How many requests were repeated and how many responses were shortened since the last call."""
        counts, self._counts = self._counts, collections.Counter[str]()
        return {f"judge/{name}": float(counts[name]) for name in ("retries", "shortened_responses")}

    async def _attempt(
        self, client: httpx.AsyncClient, request: dict[str, Any], num_responses: int
    ) -> Clustering | JudgeFailure:
        try:
            if not (self.model or self._listed_model):
                self._listed_model = read_model_name(await self._send(client, "GET", "/models"))
            request = {"model": self.model or self._listed_model, **request}
            return read_clustering(await self._send(client, "POST", "/chat/completions", request), num_responses)
        except ReplyError as error:
            kind, reason = error.kind, str(error)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            kind, reason = "unreachable", f"{describe(error)}; start it, or correct judge.url"
        except httpx.HTTPStatusError as error:
            kind, reason = self._refusal(error.response)
        except WrongAnswer as error:
            kind, reason = "malformed", describe(error)
        except httpx.HTTPError as error:
            kind, reason = "unavailable", describe(error)
        return JudgeFailure(kind, self._without_key(f"The judge at {self.url}: {reason}."))

    async def _send(
        self, client: httpx.AsyncClient, method: str, path: str, payload: dict[str, Any] | None = None
    ) -> bytes:
        """The body of a successful answer. All prompts share one wait for a server that is not there."""
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
        # The key is removed before the text is cut, so that no part of it remains.
        reason = f"it answered {status}: {printable(self._without_key(response.text))}"
        if status in (401, 403):
            variable = f"the environment variable {self._section.api_key_env}" if self._key else "judge.api_key_env"
            reason = f"it answered {status}; check {variable}"
        return "unavailable" if status == 429 or status >= 500 else "refused", reason

    def _slot(self) -> asyncio.Semaphore:
        """The current event loop's semaphore: each belongs to one loop, and a judge may outlive a loop."""
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
    # If a key is not valid in a header, httpx would quote all of it in its error.
    if not key or not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"The judge's api_key_env names the environment variable {variable}, which holds no key; set it, or leave "
            "api_key_env empty for a server without keys."
        )
    return key


def _seed(group: Group, attempt: int) -> int:
    """The same seed for the same group, another for each attempt; 31 bits, which every server accepts."""
    versions = [generation.weight_version for generation in group.generations]
    words = json.dumps([group.problem.id, versions, attempt]).encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:4]) >> 1


CHARS_PER_TOKEN = 3
"""In mathematical text: 2.98 with Qwen3's tokenizer, over 3,000 problems and over the rubric."""
TOKENS_PER_VERDICT = 50
"""In a reply, for each response: a rationale of 120 characters takes about 30, the text around it 17."""
TOKENS_PER_FRAME = 50
"""In a request, for each text: the two lines that delimit it."""


async def say_shortfalls(judge: Judge, load: JudgeLoad) -> None:
    """Warns on stderr of anything that would exceed a judge's limits."""
    if isinstance(judge, Limited):
        for shortfall in await judge.shortfalls(load):
            print(f"Warning: {shortfall}", file=sys.stderr)


def shortfalls(load: JudgeLoad, rubric: str, max_response_chars: int, max_tokens: int, context: int) -> list[str]:
    """Everything that would not fit, one sentence each; a `context` of 0 is unknown, and is taken to hold everything.

    Args:
      max_response_chars: longer responses are shortened to this many characters.
      max_tokens: the longest reply, in tokens.
      context: how many tokens the judge's prompt and reply may take together.
    """
    found, responses = [], load.num_responses
    reply = responses * TOKENS_PER_VERDICT
    if reply > max_tokens:
        found.append(
            f"The judge's reply about {responses} responses takes about {reply} tokens, more than "
            f"judge.options.max_tokens={max_tokens}; raise it, or have fewer generations of a prompt."
        )
    longest = min(load.response_tokens, math.ceil(max_response_chars / CHARS_PER_TOKEN))
    texts = load.prompt_tokens + responses * longest + (1 + responses) * TOKENS_PER_FRAME
    needed = math.ceil(len(rubric) / CHARS_PER_TOKEN) + texts + max_tokens
    if 0 < context < needed:
        found.append(
            f"{responses} responses of {longest} tokens each, the rubric and the reply take about {needed} tokens, "
            f"more than the judge's context of {context}; serve it with a longer one, or lower "
            "judge.options.max_response_chars."
        )
    return found
