"""Generates groups of N generations with a sampler.

Independently of the sampler, `Rollouts` encodes prompts, derives seeds, runs the turns of multi-turn tasks, decodes the
generated text and groups the generations by prompt.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.policy import check_embedded
from poly_epo_jax.model.stop_strings import text_before
from poly_epo_jax.records.timeline import waiting
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.types import (
    Completion,
    Conversational,
    FinishReason,
    Generation,
    Group,
    HasMetrics,
    Metrics,
    Params,
    Problem,
    Request,
    Sampler,
    Sampling,
    SupportsSleep,
    Task,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Draft:
    """A group in progress. `complete` contains the complete generations, keyed by the index of their seed."""

    problem: Problem
    prompt_ids: Int[np.ndarray, " L"]
    seeds: UInt32[np.ndarray, " N"]
    complete: dict[int, Generation] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class _Turn:
    """A request for the first turn of all generations of a draft, or for a later turn of the generation `index`.

    Attributes:
      draft: The group of the generations.
      request: Request to the sampler.
      index: Index of the generation of a later turn. 0 in the first turn.
      before: Previous turns of this generation. None in the first turn.
    """

    draft: _Draft
    request: Request
    index: int = 0
    before: Generation | None = None


class Rollouts:
    """Generates groups of N generations with a sampler.

    A Conversational task may reply to a completion that ended with a stop token. The tokens of the reply are appended
    with `loss_mask` False, and the policy continues after all previous tokens. Generated tokens are never decoded and
    encoded again, because encoding could split the text into other tokens than the policy sampled.

    Args:
      sampler: Generates completions.
      tokenizer: Tokenizer of the policy.
      task: Task of the problems. It only takes part in the generation if it is Conversational.
      max_prompt_tokens: Maximum number of prompt tokens. Longer prompts raise an error.
      stop_strings: If the text of a stop token contains one of these strings, the characters before the string belong
        to the response.
      vocab_size: Number of rows of the policy's embedding. Token ids outside the range 0 to `vocab_size - 1` in
        prompts, replies and completions raise an error. The default exceeds the size of every vocabulary.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        max_prompt_tokens: int,
        stop_strings: Sequence[str] = (),
        vocab_size: int = np.iinfo(np.int32).max,
    ):
        self.sampler, self._stop_strings, self._vocab_size = sampler, stop_strings, vocab_size
        self._tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens
        self._conversational = task if isinstance(task, Conversational) else None
        self._conversations: set[asyncio.Future[None]] = set()

    async def push_weights(self, params: Params, version: int) -> None:
        """Pushes new weights to the sampler, after all multi-turn generations in progress are complete.

        The groups of a conversational task must therefore be consumed before this method is awaited, or by a different
        asyncio task. Otherwise it waits forever.

        Args:
          params: All weights of the policy, see `Sampler.push_weights`.
          version: Number of training steps that produced the weights.
        """
        with waiting():
            while self._conversations:
                await asyncio.wait(self._conversations)
        await self.sampler.push_weights(params, version)

    async def sleep(self) -> None:
        """Frees the sampler's memory, if supported. Nothing may be generated until weights are pushed."""
        if isinstance(self.sampler, SupportsSleep):
            await self.sampler.sleep()

    def metrics(self) -> Metrics:
        """Returns the sampler's counters since the last call."""
        return self.sampler.metrics() if isinstance(self.sampler, HasMetrics) else {}

    async def generate(
        self, problems: Sequence[Problem], num_generations: int, sampling: Sampling
    ) -> AsyncGenerator[Group, None]:
        """Yields a group for each problem, as soon as its last generation is complete.

        Turns run in rounds: the next turn begins when the current turn is complete for all problems.

        Args:
          problems: Problems whose prompts are completed.
          num_generations: Number N of generations per problem.
          sampling: Sampling parameters. `max_tokens` limits the entire response, including replies of the task.

        Raises:
          ValueError: If a prompt is empty, is longer than `max_prompt_tokens` or cannot be encoded (see
            `encode_prompts`), a token is not in the policy's embedding, a log-probability is not finite, or a reply of
            the task is not a string.
          RuntimeError: If a completion is missing, or the weights changed between two turns of a generation.
        """
        drafts = [
            _Draft(problem, ids, generation_seeds(sampling.seed, problem, num_generations))
            for problem, ids in zip(problems, self._encode(problems), strict=True)
        ]
        turns = [
            _Turn(draft, Request(draft.problem.id, draft.prompt_ids, draft.seeds, sampling.max_tokens))
            for draft in drafts
        ]
        with self._conversation():
            while turns:
                next_turns: list[_Turn] = []
                sampled = self.sampler.sample([turn.request for turn in turns], sampling)
                async with contextlib.aclosing(sampled) as completions:
                    async for completion in completions:
                        turn = turns[completion.request]
                        draft, index = turn.draft, turn.index + completion.index
                        generation = self._append_completion(turn, completion)
                        generation = await self._append_reply(draft.problem, generation, sampling.max_tokens)
                        if _ends_with_reply(generation):
                            next_turns.append(_next_turn(draft, index, generation, sampling.max_tokens))
                            continue
                        draft.complete[index] = generation
                        if len(draft.complete) == num_generations:
                            generations = tuple(draft.complete[i] for i in range(num_generations))
                            yield Group(draft.problem, draft.prompt_ids, generations)
                turns = next_turns
        for draft in drafts:
            if len(draft.complete) < num_generations:
                missing = num_generations - len(draft.complete)
                raise RuntimeError(
                    f"{missing} completions of problem {draft.problem.id} are missing; check the sampler."
                )

    @contextlib.contextmanager
    def _conversation(self) -> Iterator[None]:
        """Delays weight pushes until the context ends, if the task is conversational."""
        if self._conversational is None:
            yield
            return
        ended = asyncio.get_running_loop().create_future()
        self._conversations.add(ended)
        try:
            yield
        finally:
            self._conversations.remove(ended)
            ended.set_result(None)

    def _encode(self, problems: Sequence[Problem]) -> list[Int[np.ndarray, " L"]]:
        prompts = encode_prompts(self._tokenizer, problems, self._vocab_size)
        for problem, ids in zip(problems, prompts, strict=True):
            if not len(ids):
                raise ValueError(f"The prompt of problem {problem.id} is empty; remove the problem.")
            if len(ids) > self.max_prompt_tokens:
                raise ValueError(
                    f"The prompt of problem {problem.id} has {len(ids)} tokens, more than "
                    f"train.max_prompt_tokens={self.max_prompt_tokens}; raise it, or remove the problem."
                )
        return prompts

    def _append_completion(self, turn: _Turn, completion: Completion) -> Generation:
        """Appends a completion to the previous turns. If it ended by "stop", its last token is the stop token."""
        ids, before = completion.token_ids, turn.before
        if not np.isfinite(completion.logprobs).all():
            raise ValueError(
                f"The sampler's log-probabilities for problem {turn.request.problem_id} are not finite; check its "
                "weights and sampling.temperature."
            )
        if ((ids < 0) | (ids >= self._vocab_size)).any():
            raise ValueError(
                f"The sampler returned token ids outside the range 0 to {self._vocab_size - 1} for problem "
                f"{turn.request.problem_id}; check that it samples from the trained model."
            )
        written = Generation(
            ids,
            completion.logprobs,
            np.ones(len(ids), bool),
            (self._text(ids, completion.finish_reason),),
            completion.finish_reason,
            completion.weight_versions,
        )
        if before is None:
            return written
        if (version := before.weight_versions[-1]) != (new := written.weight_versions[0]):
            raise RuntimeError(
                f"The weights changed from version {version} to {new} between two "
                f"turns of problem {turn.request.problem_id}; push weights with Rollouts.push_weights only."
            )
        return _concatenate(before, written)

    def _text(self, token_ids: Any, finish_reason: FinishReason) -> str:
        if finish_reason != "stop":
            return str(self._tokenizer.decode(token_ids))
        rest = text_before(str(self._tokenizer.decode(token_ids[-1:])), self._stop_strings)
        return str(self._tokenizer.decode(token_ids[:-1])) + rest

    async def _append_reply(self, problem: Problem, generation: Generation, max_tokens: int) -> Generation:
        """Appends the task's reply, if any. If it would leave no tokens for the policy, the response ends instead."""
        task = self._conversational
        if generation.finish_reason != "stop" or task is None:
            return generation
        text = await in_daemon_thread(lambda: task.reply(problem, generation))
        if text is None:
            return generation
        if not isinstance(text, str):
            raise ValueError(
                f"{type(task).__name__}.reply returned {text!r} ({type(text).__name__}) for problem {problem.id}; "
                "return a string, or None to end the response."
            )
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
        check_embedded(self._tokenizer, ids, self._vocab_size)
        if len(generation.token_ids) + len(ids) >= max_tokens:
            return dataclasses.replace(generation, finish_reason="length")
        logprobs, mask = np.zeros(len(ids), np.float32), np.zeros(len(ids), bool)
        versions = np.full(len(ids), generation.weight_versions[-1])
        return _concatenate(generation, Generation(ids, logprobs, mask, (text,), "stop", versions))


def generation_seeds(seed: int, problem: Problem, num_generations: int) -> UInt32[np.ndarray, " N"]:
    """Derives one seed per generation. Seeds do not depend on the other problems of the batch.

    Args:
      seed: Seed of the batch, `Sampling.seed`.
      problem: The problem. Its id is mixed into the seeds and, unless `occurrence` is 0, its `occurrence`.
      num_generations: Number N of generations. The seeds of a smaller N are a prefix of those of a larger N.

    Returns:
      Seeds [N], uint32.
    """
    words = np.frombuffer(hashlib.sha256(problem.id.encode()).digest(), np.uint32).tolist()
    again = [problem.occurrence] if problem.occurrence else []
    return np.random.SeedSequence([seed, *words, *again]).generate_state(num_generations)


def _ends_with_reply(generation: Generation) -> bool:
    """Returns True if the last turn is a reply of the task. Turns alternate, and the policy begins."""
    return len(generation.turns) % 2 == 0


def _next_turn(draft: _Draft, index: int, before: Generation, max_tokens: int) -> _Turn:
    """Creates the request for the next turn of a generation, with a new seed and the remaining token limit."""
    seed = np.random.SeedSequence([int(draft.seeds[index]), len(before.turns)]).generate_state(1)
    ids = np.concatenate([draft.prompt_ids, before.token_ids])
    return _Turn(draft, Request(draft.problem.id, ids, seed, max_tokens - len(before.token_ids)), index, before)


def _concatenate(first: Generation, second: Generation) -> Generation:
    return Generation(
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.logprobs, second.logprobs]),
        np.concatenate([first.loss_mask, second.loss_mask]),
        (*first.turns, *second.turns),
        second.finish_reason,
        np.concatenate([first.weight_versions, second.weight_versions]),
    )
