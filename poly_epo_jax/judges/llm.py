"""Judge that clusters responses with a language model on an OpenAI-compatible server (paper §4 and appendix)."""

import asyncio
import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from poly_epo_jax.config.checks import NOT_EMPTY, one_of
from poly_epo_jax.config.keys import JudgeKeys
from poly_epo_jax.judges.capacity import TOKENS_PER_FREE_VERDICT, TOKENS_PER_VERDICT, capacity_warnings
from poly_epo_jax.judges.chat_server import ChatServer
from poly_epo_jax.judges.prompt import ReplyKeys, build_messages, load_rubric, reply_schema, rubric_file
from poly_epo_jax.judges.reply import ReplyError, read_clustering, read_context, read_usage
from poly_epo_jax.registry import Range
from poly_epo_jax.system.digests import file_digests
from poly_epo_jax.system.http_client import ServerError, backoff_seconds
from poly_epo_jax.types import Clustering, Generation, Group, JudgeFailure, JudgeLoad, Problem, Task

COUNTS = ("retries", "shortened_responses", "prompt_tokens", "reply_tokens")
INVALID = ("truncated", "malformed")
"""Kinds of failures after which the request is retried with another seed."""


class LLMJudge:
    """Clusters the N responses of a prompt with one chat completion.

    Every reply is validated. All errors result in a JudgeFailure of one of these kinds:

      unreachable  The server did not accept connections for `judge.wait_seconds`.
      limited      The server limited the rate of requests (status 429, or the header Retry-After) for
                   `judge.wait_seconds`.
      refused      The server responded with a permanent error.
      unavailable  The server responded with status 408, 409 or 5xx or did not respond in time, or the connection
                   failed. The request is retried after a delay.
      truncated    The reply is incomplete. The request is retried with another seed.
      malformed    The reply does not match the schema. The request is retried with another seed.

    Args:
      task: Task of the run, or None. Not used.
      section: Section `judge` of the configuration: URL, model, API key and request limits.
      temperature: Sampling temperature of the judge.
      send_seed: Whether requests contain a seed. Without a seed and with temperature 0, invalid replies are not
        requested again.
      max_tokens: Maximum number of tokens of a reply. Each response takes about 50 tokens, for a rationale of 120
        characters and the JSON around it, or 512 without a JSON schema.
      max_tokens_key: Name of this limit in requests. Reasoning models of OpenAI require max_completion_tokens.
      attempts: Maximum number of requests per prompt, including the first.
      response_format: Constraint on the format of the reply: a JSON schema, any JSON object, or none.
      prompt_file: Path of a text file that replaces the rubric, in which `{num_responses}` stands for N. If empty, the
        rubric of the package is used.
      single_message: Whether rubric and responses are sent in one user message, instead of a system message and a user
        message.
      rationale_key: Name of the rationale of a response in the reply.
      cluster_key: Name of the cluster of a response in the reply.
      max_response_chars: Maximum number of characters per response. Longer responses are shortened in the middle.
      context_tokens: Maximum number of tokens of prompt and reply. 0 uses the value listed by the server, if any.

    Raises:
      ValueError: If the prompt file does not exist or is not UTF-8 text, if both keys of a reply are equal, or if API
        key or proxy are invalid, see `ChatServer`.
    """

    def __init__(
        self,
        task: Task | None,
        section: JudgeKeys,
        *,
        temperature: Annotated[float, Range(0, 2)] = 0.7,
        send_seed: bool = True,
        max_tokens: Annotated[int, Range(1, 2**20)] = 2048,
        max_tokens_key: Annotated[str, one_of("max_tokens", "max_completion_tokens")] = "max_tokens",
        attempts: Annotated[int, Range(1, 100)] = 3,
        response_format: Annotated[str, one_of("json_schema", "json_object", "none")] = "json_schema",
        prompt_file: str = "",
        single_message: bool = False,
        rationale_key: Annotated[str, NOT_EMPTY] = "rationale",
        cluster_key: Annotated[str, NOT_EMPTY] = "cluster",
        max_response_chars: Annotated[int, Range(2, 10**7)] = 20_000,
        context_tokens: Annotated[int, Range(0, 2**30)] = 0,
    ):
        if rationale_key == cluster_key:
            raise ValueError(
                f"{section.dotted('options')}.rationale_key={rationale_key!r} must differ from its cluster_key; change "
                "one of them."
            )
        self._keys = ReplyKeys(rationale_key, cluster_key)
        self._rubric = load_rubric(prompt_file, self._keys, section.NAME)
        (self._rubric_digest,) = file_digests([rubric_file(prompt_file)])
        self._single_message, self._response_format = single_message, response_format
        self._limits = {"temperature": temperature, max_tokens_key: max_tokens}
        self._send_seed, self._attempts = send_seed, attempts
        self._is_deterministic, self._has_warned = not (temperature or send_seed), False
        self._max_tokens, self._context_tokens = max_tokens, context_tokens
        self._max_response_chars = max_response_chars
        self.model, self._section, self._server = section.model, section.NAME, ChatServer(section)

    async def __call__(self, question: str, responses: Sequence[str]) -> Clustering | JudgeFailure:
        """Clusters the responses to a question of another program, see `cluster`."""
        generations = tuple(map(Generation.from_turns, responses))
        return await self.cluster(Group(Problem(question, question, answer=""), np.zeros(1, np.int32), generations))

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        """Requests a clustering, with a rationale for each response. Returns the last failure if all attempts fail."""
        request = self._request(group)
        async with self._server.slot(), self._server.open_client() as client:
            attempt = 1
            while True:
                seed = {"seed": _seed(group, attempt)} if self._send_seed else {}
                try:
                    body = {"model": await self._server.model_name(client), **request, **seed}
                    reply = await self._server.send(client, "POST", "/chat/completions", body)
                    self._server.counts.update(read_usage(reply))
                    return read_clustering(reply, len(group.generations), self._keys, self._section)
                except ReplyError as error:
                    if attempt == self._attempts or not self._is_retried(error):
                        return JudgeFailure(error.kind, self._sentence(error))
                    if error.kind == "unavailable":
                        await asyncio.sleep(backoff_seconds(attempt))
                attempt += 1
                self._server.counts["retries"] += 1

    async def wait_until_ready(self) -> None:
        """Waits until the server responds.

        Raises:
          ServerError: If the server does not respond within `judge.wait_seconds`, or if it rejects the API key.
        """
        await self._server.wait_until_ready()

    async def identity(self) -> dict[str, str]:
        """Returns the name of the model, which the server lists if `judge.model` is empty, and the rubric's digest.

        Raises:
          ServerError: If the server does not respond, or does not list a model.
        """
        try:
            async with self._server.open_client() as client:
                model = await self._server.model_name(client)
        except ReplyError as error:
            text = (
                f"Failed to get the model name of the judge at {self._server.url}: {error}. Set {self._section}.model."
            )
            raise ServerError(self._server.without_key(text)) from None
        return {"judge.model": model, "judge.options.prompt_file": self._rubric_digest}

    async def capacity_warnings(self, load: JudgeLoad) -> list[str]:
        """Returns one sentence per limit of the judge that the load exceeds: its context, or the length of a reply."""
        context = self._context_tokens
        if not context:
            with contextlib.suppress(ReplyError):  # the first prompt reports the error
                async with self._server.open_client() as client:
                    context = read_context(await self._server.send(client, "GET", "/models"), self.model)
        per_verdict = TOKENS_PER_VERDICT if self._response_format == "json_schema" else TOKENS_PER_FREE_VERDICT
        return capacity_warnings(
            load, self._rubric, self._max_response_chars, self._max_tokens, context, per_verdict, self._section
        )

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of retried requests, shortened responses and tokens since the last call."""
        return {f"judge/{name}": float(self._server.counts.pop(name, 0)) for name in COUNTS}

    def _request(self, group: Group) -> dict[str, Any]:
        """Returns the parts of a request that do not depend on the attempt."""
        responses = [generation.turns for generation in group.generations]
        messages, num_shortened = build_messages(
            self._rubric, group.problem.prompt, responses, self._max_response_chars
        )
        self._server.counts["shortened_responses"] += num_shortened
        if self._single_message:
            messages = [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]
        request = {"messages": messages, **self._limits}
        if self._response_format == "json_schema":
            schema = {"name": "clusters", "schema": reply_schema(len(responses), self._keys), "strict": True}
            return request | {"response_format": {"type": "json_schema", "json_schema": schema}}
        return request if self._response_format == "none" else request | {"response_format": {"type": "json_object"}}

    def _is_retried(self, error: ReplyError) -> bool:
        if error.kind in INVALID and self._is_deterministic:
            if not self._has_warned:
                self._has_warned = True
                print(
                    f"Warning: {self._sentence(error)} Invalid replies are not requested again, because "
                    f"{self._section}.options.temperature=0 and send_seed=False would give the same reply.",
                    file=sys.stderr,
                )
            return False
        return error.kind == "unavailable" or error.kind in INVALID

    def _sentence(self, error: ReplyError) -> str:
        return self._server.without_key(f"The judge at {self._server.url}: {error}.")


def _seed(group: Group, attempt: int) -> int:
    """Returns a seed that depends on the group and the attempt only. It has 31 bits, which all servers accept."""
    words = json.dumps([group.problem.id, [int(one.weight_versions[-1]) for one in group.generations], attempt])
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4]) >> 1
