"""Verifies the content of servers after a weight update, because a reported weight version proves nothing.

Up to three checks are active for a server (`evidence.py`):

1. Bytes: checksums of tensors equal those of the pushed bytes. If a server uses another algorithm or memory layout, the
   checksum of a tensor must change exactly when its pushed bytes change.
2. Change: the log-probabilities of a fixed probe change when the pushed bytes do, do not depend on the prefix cache,
   and are equal on all servers that had equal ones before.
3. Trainer: the log-probabilities of the probe agree with the trainer's. One step can change them by less than the
   rounding error of bfloat16, so this check only detects gross faults.

The probe is a prompt followed by generated tokens, because servers compute log-probabilities of prompt tokens without
the prefix cache. It is requested twice: first for one token like every other prompt, and then with a new cache salt,
which excludes cached blocks. The most likely tokens are generated, so that the answer does not depend on a seed. The
first request must not read the probe from the prefix cache, which an update empties.

With `rollouts.in_flight`, servers answer the probe while they generate other responses, whose number affects rounding.
The second check is then not active.
"""

import asyncio
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import httpx
import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.metrics.branching import shared_prefix
from poly_epo_jax.rollouts.completion_check import completion_flaw
from poly_epo_jax.rollouts.servers.dialect import Dialect, ServerCompletion
from poly_epo_jax.rollouts.servers.evidence import (
    Evidence,
    Verified,
    bytes_flaw,
    change_flaw,
    describe_checks,
    exact_tensors,
    is_same,
    trainer_flaw,
    valid_checksums,
)
from poly_epo_jax.rollouts.servers.weight_reference import PushedWeights, WeightReference
from poly_epo_jax.system.http_client import InvalidResponseError
from poly_epo_jax.types import Metrics, Params, Request, Sampling

GENERATED_TOKENS = 4
"""Number of tokens that the probe generates. Its prompt is this much longer than two blocks of the prefix cache."""
MAX_PROBE_ID = 8192
"""Maximum token id in the probe's prompt. Low ids are common tokens in byte-pair vocabularies."""
MAX_DIFFERENCE = {"float32": 0.05, "bfloat16": 0.5}
"""Maximum mean difference between the log-probabilities of server and trainer, in nats, by dtype of the matmuls."""
MAX_SHARED_TOKENS = 8
"""Maximum number of tokens that the probe may share with the beginning of other prompts, which may be cached."""
PROOFS = ("bytes_proofs", "change_proofs", "trainer_proofs")


class ContentCheck:
    """Verifies weight updates of servers by content.

    Args:
      dialect: API of the servers.
      reference: Computes the values that servers must return.
      max_sequence_tokens: Maximum number of tokens of a prompt with its response, which limits the probe.
      vocab_size: Size of the vocabulary.
      stop_ids: Token ids that end a generation.
      in_flight: Whether the servers generate other responses during the verification.
    """

    def __init__(
        self,
        dialect: Dialect,
        reference: WeightReference,
        max_sequence_tokens: int,
        vocab_size: int,
        stop_ids: Sequence[int],
        *,
        in_flight: bool = False,
    ):
        self._dialect, self._reference = dialect, reference
        self._stop_ids, self._vocab_size, self._in_flight = stop_ids, vocab_size, in_flight
        self._probe = make_probe(dialect.max_cache_block, max_sequence_tokens, vocab_size, stop_ids)
        self._prepared: tuple[PushedWeights, Params] | None = None
        self._pushed: PushedWeights | None = None
        self._params: Params | None = None
        self._scores: list[tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]] = []
        self._verified: dict[str, Verified] = {}
        self._announced: dict[str, str] = {}
        self._salts = itertools.count()
        self._counts = Counter[str]()

    def prepare(self, params: Params) -> None:
        """Reads the content of the next push, while servers still generate with the current weights."""
        self._prepared = self._reference.describe(params), params

    def switch(self) -> None:
        """Makes the prepared content the content that servers must have."""
        assert self._prepared is not None
        (self._pushed, self._params), self._prepared, self._scores = self._prepared, None, []

    def release(self) -> None:
        """Drops the weights. Servers that are verified later are compared with the answers of the other servers."""
        self._params = None

    def metrics(self) -> Metrics:
        """Returns the numbers of updates that each check has proven, and of rejected updates, since the last call."""
        counts, self._counts = self._counts, Counter[str]()
        return {f"rollouts/{name}": float(counts[name]) for name in (*PROOFS, "rejected_updates")}

    async def verify(self, client: httpx.AsyncClient, urls: Sequence[str], name: str) -> dict[str, str]:
        """Verifies servers after a weight update.

        Args:
          client: Client for the HTTP requests.
          urls: URLs of the servers.
          name: Name of the weights.

        Returns:
          The servers that do not have the pushed weights, with a one-line reason.

        Raises:
          httpx.HTTPError: If a server does not respond.
        """
        found = dict(zip(urls, await asyncio.gather(*(self._collect(client, url, name) for url in urls)), strict=True))
        shown = {url: one for url, one in found.items() if isinstance(one, Evidence)}
        flaws = {url: one for url, one in found.items() if isinstance(one, str)}
        for url, evidence in shown.items():
            results = await self._results(url, evidence)
            self._counts.update(check for check, flaw in results.items() if flaw == "")
            if flaw := next(filter(None, results.values()), None):
                flaws[url] = flaw
        passed = {url: evidence for url, evidence in shown.items() if url not in flaws}
        flaws |= self._disagreements(passed, name)
        for url, evidence in passed.items():
            if url not in flaws:
                self._accept(url, evidence, name)
        self._counts["rejected_updates"] += len(flaws)
        self._announce()
        return {url: f"{url} failed the verification of an update to {name}: {flaw}." for url, flaw in flaws.items()}

    async def has_weights(self, client: httpx.AsyncClient, url: str, name: str) -> bool:
        """Returns True if a server that was verified with the weights `name` still answers the probe in the same way.

        Args:
          client: Client for the HTTP request.
          url: URL of the server.
          name: Name of the weights.

        Raises:
          httpx.HTTPError: If the server does not respond.
        """
        verified = self._verified.get(url)
        if verified is None or verified.name != name or not verified.evidence.is_repeatable:
            return False
        return is_same(verified.evidence.answer, await self._ask(client, url, self._new_salt(name)))

    async def _collect(self, client: httpx.AsyncClient, url: str, name: str) -> Evidence | str:
        """Returns the evidence of a server, or the reason why it cannot be verified."""
        try:
            cached = await self._ask(client, url, max_tokens=1)
            answer = await self._ask(client, url, self._new_salt(name))
            first = answer._replace(token_ids=answer.token_ids[:1], logprobs=answer.logprobs[:1])
            is_repeatable = not self._in_flight and is_same(cached, first)
            is_stale = isinstance(cached.cached_tokens, int) and cached.cached_tokens > MAX_SHARED_TOKENS
            if not (self._in_flight or is_repeatable or is_stale):
                is_stale = is_same(answer, await self._ask(client, url, self._new_salt(name)))
            if is_stale:
                return "its prefix cache contains keys and values of other weights; restart it"
            checksums = await self._dialect.checksums(client, url, self._reference.middle_layers)
        except InvalidResponseError as error:
            return f"its answer is invalid: {error}; see its log"
        if answer.weight_version != name:
            return (
                f"it generates with weights {answer.weight_version}; check whether another run updates the same server"
            )
        return Evidence(answer, is_repeatable, valid_checksums(checksums or []), is_quantized=checksums is None)

    async def _ask(
        self, client: httpx.AsyncClient, url: str, cache_salt: str = "", max_tokens: int = GENERATED_TOKENS
    ) -> ServerCompletion:
        max_tokens = min(max_tokens, self._probe.max_tokens)
        probe = dataclasses.replace(self._probe, cache_salt=cache_salt, max_tokens=max_tokens)
        (answer,) = await self._dialect.generate(
            client, url, probe, [0], Sampling(probe.max_tokens, temperature=0.0), self._stop_ids
        )
        if isinstance(answer, InvalidResponseError):
            raise answer
        if answer.finish_reason is None:
            raise InvalidResponseError("the generation was aborted")
        limits = {"max_tokens": max_tokens, "stop_ids": self._stop_ids, "vocab_size": self._vocab_size}
        flaw = completion_flaw(answer.token_ids, answer.logprobs, answer.finish_reason, **limits)
        if flaw := flaw or answer.weight_flaw([answer.weight_version or ""]):
            raise InvalidResponseError(flaw)
        return answer

    def _new_salt(self, name: str) -> str:
        return f"{name}-{next(self._salts)}"

    async def _results(self, url: str, evidence: Evidence) -> dict[str, str | None]:
        """Returns the result of each check: "" if it proves the update, a flaw, or None if it proves nothing."""
        assert self._pushed is not None
        before, answer = self._verified.get(url), evidence.answer
        difference = None if evidence.is_quantized else await self._difference(answer)
        tolerance = MAX_DIFFERENCE[self._reference.dtype]
        return {
            "bytes_proofs": bytes_flaw(self._pushed, evidence, before),
            "change_proofs": change_flaw(self._pushed, evidence, before),
            "trainer_proofs": None if difference is None else trainer_flaw(difference, tolerance),
        }

    async def _difference(self, answer: ServerCompletion) -> float | None:
        """Returns the mean difference from the trainer's log-probabilities over the tokens that the trainer scored."""
        if self._params is not None and not any(np.array_equal(ids, answer.token_ids) for ids, _ in self._scores):
            scored = await asyncio.to_thread(
                self._reference.logprobs, self._params, self._probe.prompt_ids, answer.token_ids
            )
            self._scores.append((answer.token_ids, scored))
        best = max(self._scores, key=lambda score: shared_prefix(score[0], answer.token_ids), default=None)
        if best is None or not (count := shared_prefix(best[0], answer.token_ids)):
            return None
        return float(np.abs(best[1][:count] - answer.logprobs[:count]).mean())

    def _disagreements(self, shown: Mapping[str, Evidence], name: str) -> dict[str, str]:
        """Returns the servers whose answer is not that of the majority of their kind.

        Args:
          shown: Evidence of the servers that are verified.
          name: Name of their weights. Other servers that were verified with the same weights are included.
        """
        kinds: dict[str, dict[str, ServerCompletion]] = {}
        for url, verified in self._verified.items():
            evidence = shown.get(url, verified.evidence if verified.name == name else None)
            if evidence is not None and evidence.is_repeatable:
                kinds.setdefault(verified.kind, {})[url] = evidence.answer
        flaws = {}
        for answers in kinds.values():
            for url in answers.keys() & shown.keys():
                num_equal = sum(is_same(answers[url], answer) for answer in answers.values())
                if 1 < len(answers) >= 2 * num_equal:
                    flaws[url] = "its log-probabilities differ from those of servers that had the same ones before"
        return flaws

    def _accept(self, url: str, evidence: Evidence, name: str) -> None:
        assert self._pushed is not None
        exact, before = exact_tensors(self._pushed, evidence.checksums), self._verified.get(url)
        if before is None:
            kind = next(
                (
                    one.kind
                    for one in self._verified.values()
                    if one.name == name and is_same(one.evidence.answer, evidence.answer)
                ),
                url,
            )
        else:
            exact, kind = exact | before.exact, before.kind
        self._verified[url] = Verified(name, self._pushed, evidence, exact, kind)

    def _announce(self) -> None:
        """Prints the active checks of servers once, and again if they change."""
        new: dict[str, list[str]] = {}
        for url, verified in self._verified.items():
            text = describe_checks(verified, MAX_DIFFERENCE[self._reference.dtype])
            if self._announced.get(url) != text:
                self._announced[url] = text
                new.setdefault(text, []).append(url)
        for text, urls in new.items():
            print(f"Weight updates of {', '.join(urls)} are verified by {text}.", file=sys.stderr)


def make_probe(cache_block: int, max_sequence_tokens: int, vocab_size: int, stop_ids: Sequence[int]) -> Request:
    """Creates the request that verifies a weight update.

    Args:
      cache_block: Number of tokens of a block of the prefix cache.
      max_sequence_tokens: Maximum number of tokens of the prompt with its response, at least 2.
      vocab_size: Size of the vocabulary.
      stop_ids: Token ids that end a generation, which the prompt does not contain.

    Returns:
      A request with a random prompt. Its tokens have low ids, which are common in byte-pair vocabularies.
    """
    num_generated = min(GENERATED_TOKENS, max_sequence_tokens - 1)
    choices = np.setdiff1d(np.arange(1, min(vocab_size, MAX_PROBE_ID)), stop_ids)
    length = min(2 * cache_block + GENERATED_TOKENS, max_sequence_tokens - num_generated)
    prompt_ids = np.random.default_rng(0).choice(choices, length).astype(np.int32)
    return Request("weight verification", prompt_ids, np.zeros(1, np.uint32), num_generated)
