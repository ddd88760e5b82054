"""Client of the OpenAI-compatible server of a model: address, API key, waiting, and the causes of failed requests."""

import asyncio
import collections
import os
import re
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from poly_epo_jax.config.checks import VARIABLE
from poly_epo_jax.config.keys import ChatServerKeys
from poly_epo_jax.judges.reply import ReplyError, read_error, read_model_name
from poly_epo_jax.system.evaluates import EVALUATES
from poly_epo_jax.system.http_client import (
    InvalidResponseError,
    ServerError,
    backoff_seconds,
    describe_error,
    open_client,
    proxy_of,
    quote,
    retry_after_seconds,
    wait_until_healthy,
)

VERSION = re.compile(r"/v[0-9]\w*/")
REMEDIES = {
    "max_tokens": "max_tokens_key=max_completion_tokens",
    "seed": "send_seed=False",
    "temperature": "temperature to the value that the model supports",
    "response_format": "response_format=json_object or none",
}
"""Remedies for parameters of a request that a server reports as not supported."""
RATE_LIMITED = re.compile("rate_?limit|resource_?exhausted", re.IGNORECASE)
"""Names of the error in a response with status 200 that corresponds to status 429."""
MIN_KEY_LENGTH = 8
"""Keys with fewer characters are placeholders, and are not replaced in responses, which may contain them as words."""


class ChatServer:
    """The server of a language model.

    Attributes:
      url: Address of the server.
      counts: Number of repeated requests, as "retries", of training or, within an evaluation, of evaluations.

    Args:
      section: Section of the configuration: URL, model, API key and request limits. "/v1" is appended to the URL
        unless its path contains another API version, such as Gemini's /v1beta/openai.

    Raises:
      ValueError: If the environment variable of the API key does not contain a valid key, or if HTTPS_PROXY selects a
        proxy that does not use HTTP.
    """

    def __init__(self, section: ChatServerKeys):
        self.url, self._section, self._model = section.url.rstrip("/"), section, section.model
        self._counts = {evaluates: collections.Counter[str]() for evaluates in (False, True)}
        self._api = self.url if VERSION.search(urlsplit(self.url).path + "/") else f"{self.url}/v1"
        self._key = _read_key(section.api_key_env, section.dotted("api_key_env"))
        self._proxy = proxy_of(self.url) if self._key else ""
        if self._key and not re.match(r"https:|http://(localhost|127\.[0-9.]+|\[::1\])(:|/|$)", self.url):
            print(f"Warning: The API key is sent to {self.url} without encryption; use https://.", file=sys.stderr)
        self._unreachable_since: float | None = None
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @property
    def counts(self) -> collections.Counter[str]:
        return self._counts[EVALUATES.get()]

    def slot(self) -> asyncio.Semaphore:
        """Returns the semaphore of the current event loop, because a semaphore belongs to one loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._section.max_concurrent)
        return self._slots[1]

    def open_client(self) -> httpx.AsyncClient:
        """Creates the HTTP client that `send` requires."""
        return open_client(self._section.timeout_seconds, proxy=self._proxy)

    async def send(
        self, client: httpx.AsyncClient, method: str, path: str, payload: dict[str, Any] | None = None
    ) -> bytes:
        """Sends a request, and returns the body of a successful response, in which the API key is replaced.

        If the server is unreachable or limits the rate of requests, the request is repeated for at most
        `judge.wait_seconds`. All requests share one wait for an unreachable server, because it accepts none of them.

        Args:
          client: Client from `open_client`.
          method: HTTP method.
          path: Path of the endpoint, after the API version.
          payload: JSON content of the request.

        Raises:
          ReplyError: If the request fails. Its kind is "unreachable", "limited", "unavailable", "refused" or
            "malformed", see `LLMJudge`.
        """
        limited_since: float | None = None
        failures = 0
        while True:
            try:
                response = await client.request(method, f"{self._api}{path}", json=payload, headers=self._headers())
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                proxy = ", or the proxy in HTTPS_PROXY" if self._proxy else ""
                reason = f"{describe_error(error)}; start the server, or correct {self._section.dotted('url')}{proxy}"
                failure, delay, now = ReplyError("unreachable", reason), 0.0, time.monotonic()
                since = self._unreachable_since = self._unreachable_since or now
            except httpx.HTTPError as error:
                raise ReplyError(
                    "malformed" if isinstance(error, InvalidResponseError) else "unavailable", describe_error(error)
                ) from None
            else:
                self._unreachable_since, failure = None, self._failure(response)
                if failure is None:
                    if len(self._key) < MIN_KEY_LENGTH:
                        return response.content
                    # The parser shortens texts for messages, which could leave a part of the key.
                    return response.content.replace(self._key.encode(), b"[key]")
                if failure.kind != "limited":
                    raise failure
                delay, now = retry_after_seconds(response), time.monotonic()
                since = limited_since = limited_since or now
            failures += 1
            left = since + self._section.wait_seconds - now
            if left <= 0 or delay > left:
                raise failure
            self.counts["retries"] += failure.kind == "limited"
            await asyncio.sleep(max(delay, min(backoff_seconds(failures), left)))

    async def model_name(self, client: httpx.AsyncClient) -> str:
        """Returns the name of the model, which the server lists if it is not configured.

        Args:
          client: Client from `open_client`.

        Raises:
          ReplyError: If the server does not list a model, or the request fails.
        """
        if not self._model:
            self._model = read_model_name(await self.send(client, "GET", "/models"), self._section.NAME)
        return self._model

    async def wait_until_ready(self) -> None:
        """Waits until the server responds. Unless the model is configured, the server must list its models.

        Raises:
          ServerError: If the server does not respond within `judge.wait_seconds`, or if it rejects the API key.
        """
        try:
            await wait_until_healthy(
                f"{self._api}/models",
                self._section.wait_seconds,
                f"Judge {self.url}",
                self._headers(),
                self._proxy,
                required=not self._section.model,
            )
        except ServerError as error:
            raise ServerError(self.without_key(str(error))) from None

    def without_key(self, text: str) -> str:
        """Replaces the API key in a text."""
        return text.replace(self._key, "[key]") if self._key else text

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _failure(self, response: httpx.Response) -> ReplyError | None:
        """Returns the failure that a response reports by its status, or by an error object with status 200."""
        error, status, dotted = read_error(response.content), response.status_code, self._section.dotted
        if response.is_success and not error:
            return None
        # The key is removed before the text is shortened, because shortening could leave a part of the key.
        reason = f"HTTP status {status}: {quote(self.without_key(response.text))}"
        if response.is_success:
            status = _status_of(error)
        code, parameter = str(error.get("code")), str(error.get("param"))
        if status in (401, 403):
            variable = f"the environment variable {self._section.api_key_env}" if self._key else dotted("api_key_env")
            return ReplyError("refused", f"HTTP status {status}; check {variable}")
        if code.startswith("unsupported") and parameter in REMEDIES:
            return ReplyError("refused", f"{reason}; set {dotted('options')}.{REMEDIES[parameter]}")
        is_temporary = status in (408, 409, 429) or status >= 500
        if not is_temporary or code == "insufficient_quota":
            return ReplyError("refused", reason)
        delay = retry_after_seconds(response)
        if status != 429 and not delay:
            return ReplyError("unavailable", reason)
        requested = f" above the {delay:g} s that the server requests" if delay else ""
        remedy = f"lower {dotted('max_concurrent')}, or raise {dotted('wait_seconds')}{requested}"
        return ReplyError("limited", f"{reason}; {remedy}")


def _status_of(error: dict[str, Any]) -> int:
    """Returns the HTTP status that corresponds to the error object of a response with status 200."""
    if re.fullmatch("[45][0-9][0-9]", str(error.get("code"))):
        return int(error["code"])
    return 429 if any(RATE_LIMITED.search(str(error.get(name))) for name in ("code", "type", "status")) else 500


def _read_key(variable: str, name: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    # If the key is invalid in a header, the error message of httpx would contain the key.
    if not key or not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"The environment variable {variable if VARIABLE.fullmatch(variable) else '...'} ({name}) does not "
            f"contain a valid API key; set it, or leave {name} empty for a server without keys."
        )
    return key
