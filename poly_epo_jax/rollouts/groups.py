"""Prompts in, groups of N generations out, for every sampler: encoding, seeds, turns, decoding, grouping."""

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.stop_strings import text_before
from poly_epo_jax.records.timeline import waiting
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.types import (
    Completion,
    Conversational,
    Counting,
    FinishReason,
    Generation,
    Group,
    Metrics,
    Params,
    Problem,
    Request,
    Sampler,
    Sampling,
    Sleeping,
    Task,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Draft:
    """A group in progress: its complete generations, keyed by the index of their seed."""

    problem: Problem
    prompt_ids: Int[np.ndarray, " L"]
    seeds: UInt32[np.ndarray, " N"]
    complete: dict[int, Generation] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class _Turn:
    """A request for one turn: of all of a draft's generations, or of the one at `index`, which continues `before`."""

    draft: _Draft
    request: Request
    index: int = 0
    before: Generation | None = None


class Rollouts:
    """Makes groups of generations with a sampler.

    If the task is Conversational, it may reply to a completion that ended with a stop token. The reply's tokens are
    appended outside `loss_mask`, and the policy continues from all tokens so far; its own are never encoded again.

    Args:
      max_prompt_tokens: longer prompts are refused.
      stop_strings: if a stop token contains one of these, the characters before it belong to the text.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        max_prompt_tokens: int,
        stop_strings: Sequence[str] = (),
    ):
        self.sampler, self._stop_strings = sampler, stop_strings
        self._tokenizer, self._task, self.max_prompt_tokens = tokenizer, task, max_prompt_tokens
        self._conversations: set[asyncio.Future[None]] = set()

    async def push_weights(self, params: Params, version: int) -> None:
        """Pushes new weights to the sampler, after all multi-turn generations in progress are complete.

        Callers must therefore read all groups of a conversational task before they await this.

        Args:
          params: All weights of the policy, see `Sampler.push_weights`.
          version: Number of training steps that produced the weights.
        """
        with waiting():
            while self._conversations:
                await asyncio.wait(self._conversations)
        await self.sampler.push_weights(params, version)

    async def sleep(self) -> None:
        """Frees the sampler's memory for the update, if the sampler can. Nothing may be generated before a push."""
        if isinstance(self.sampler, Sleeping):
            await self.sampler.sleep()

    def metrics(self) -> Metrics:
        """The sampler's counts since the last call."""
        return self.sampler.metrics() if isinstance(self.sampler, Counting) else {}

    async def generate(
        self, problems: Sequence[Problem], num_generations: int, sampling: Sampling
    ) -> AsyncGenerator[Group, None]:
        """Yields a group for each problem, as soon as its last generation is complete.

        Turns run in rounds: the next one begins when the current one is complete for all problems.

        Raises:
          ValueError: a prompt is empty, or longer than `max_prompt_tokens`.
          RuntimeError: the sampler left a completion out, or changed its weights between two turns.
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
                        generation = self._joined(turn, completion)
                        generation = await self._replied(draft.problem, generation, sampling.max_tokens)
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
                raise RuntimeError(f"The sampler left out {missing} completions of problem {draft.problem.id}.")

    @contextlib.contextmanager
    def _conversation(self) -> Iterator[None]:
        """If the task is conversational, new weights wait until this context ends."""
        if not isinstance(self._task, Conversational):
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
        prompts = encode_prompts(self._tokenizer, problems)
        for problem, ids in zip(problems, prompts, strict=True):
            if not len(ids):
                raise ValueError(f"The prompt of problem {problem.id} is empty; leave the problem out.")
            if len(ids) > self.max_prompt_tokens:
                raise ValueError(
                    f"The prompt of problem {problem.id} has {len(ids)} tokens, more than "
                    f"train.max_prompt_tokens={self.max_prompt_tokens}; raise that, or leave the problem out."
                )
        return prompts

    def _joined(self, turn: _Turn, completion: Completion) -> Generation:
        """Appends the completion to what came before; if it stopped, its last token is the stop token."""
        ids, before = completion.token_ids, turn.before
        if not np.isfinite(completion.logprobs).all():
            raise ValueError(
                f"The sampler's log-probabilities for problem {turn.request.problem_id} are not finite; its weights or "
                "sampling.temperature are out of all bounds."
            )
        written = Generation(
            ids,
            completion.logprobs,
            np.ones(len(ids), bool),
            (self._text(ids, completion.finish_reason),),
            completion.finish_reason,
            completion.weight_version,
        )
        if before is None:
            return written
        if before.weight_version != written.weight_version:
            raise RuntimeError(
                f"Between two turns of problem {turn.request.problem_id} the weights changed from version "
                f"{before.weight_version} to {written.weight_version}; push weights through Rollouts only."
            )
        return _concatenated(before, written)

    def _text(self, token_ids: Any, finish_reason: FinishReason) -> str:
        if finish_reason != "stop":
            return str(self._tokenizer.decode(token_ids))
        rest = text_before(str(self._tokenizer.decode(token_ids[-1:])), self._stop_strings)
        return str(self._tokenizer.decode(token_ids[:-1])) + rest

    async def _replied(self, problem: Problem, generation: Generation, max_tokens: int) -> Generation:
        """Appends the task's reply, if there is one. A reply that leaves no room ends the response."""
        task = self._task
        if generation.finish_reason != "stop" or not isinstance(task, Conversational):
            return generation
        text = await in_daemon_thread(lambda: task.reply(problem, generation))
        if text is None:
            return generation
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
        if len(generation.token_ids) + len(ids) >= max_tokens:
            return dataclasses.replace(generation, finish_reason="length")
        logprobs, mask = np.zeros(len(ids), np.float32), np.zeros(len(ids), bool)
        return _concatenated(generation, Generation(ids, logprobs, mask, (text,), "stop", generation.weight_version))


def generation_seeds(seed: int, problem: Problem, num_generations: int) -> UInt32[np.ndarray, " N"]:
    """One seed per generation, which does not depend on the other problems that are generated for."""
    words = np.frombuffer(hashlib.sha256(problem.id.encode()).digest(), np.uint32).tolist()
    again = [problem.occurrence] if problem.occurrence else []
    return np.random.SeedSequence([seed, *words, *again]).generate_state(num_generations)


def _ends_with_reply(generation: Generation) -> bool:
    """The policy and the task take turns, and the policy begins."""
    return len(generation.turns) % 2 == 0


def _next_turn(draft: _Draft, index: int, before: Generation, max_tokens: int) -> _Turn:
    """Continues from all tokens so far, with a seed of its own and the room that is left."""
    seed = np.random.SeedSequence([int(draft.seeds[index]), len(before.turns)]).generate_state(1)
    ids = np.concatenate([draft.prompt_ids, before.token_ids])
    return _Turn(draft, Request(draft.problem.id, ids, seed, max_tokens - len(before.token_ids)), index, before)


def _concatenated(first: Generation, second: Generation) -> Generation:
    return Generation(
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.logprobs, second.logprobs]),
        np.concatenate([first.loss_mask, second.loss_mask]),
        (*first.turns, *second.turns),
        second.finish_reason,
        second.weight_version,
    )
