"""Generates groups of N generations with a sampler.

Independently of the sampler, `Rollouts` encodes prompts, derives seeds, plays the episodes of interactive tasks,
decodes the generated text and groups the generations by prompt.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.stop_strings import text_before
from poly_epo_jax.records.timeline import waiting
from poly_epo_jax.rollouts.between_turns import encode_reply
from poly_epo_jax.rollouts.environments import Environments, FailedEpisode
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.rollouts.returned_values import maximum_reply
from poly_epo_jax.rollouts.turn_queue import TurnQueue, Turns
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.system.evaluates import EVALUATES
from poly_epo_jax.system.http_client import RequestError
from poly_epo_jax.system.repeated_warnings import warn_repeatedly
from poly_epo_jax.system.run_to_completion import cancel_all
from poly_epo_jax.system.text import SURROGATE
from poly_epo_jax.types import (
    Completion,
    EnvironmentFailure,
    FinishReason,
    Generation,
    Group,
    Interactive,
    Metrics,
    Params,
    Problem,
    Sampler,
    Sampling,
    SupportsSleep,
    Task,
)


class Rollouts:
    """Generates groups of N generations with a sampler.

    Each generation of an Interactive task is an episode, which may reply to a completion that ended with a stop token.
    The tokens of the reply are appended with `loss_mask` False, and the policy continues after all previous tokens.
    Characters of replies and lone surrogates of prompts that cannot be encoded are replaced and counted.
    Generated tokens are never decoded and encoded again, because encoding could split the text into other tokens than
    the policy sampled.

    Args:
      sampler: Generates completions.
      tokenizer: Tokenizer of the policy.
      task: Task of the problems. It only takes part in the generation if it is Interactive.
      max_prompt_tokens: Maximum number of prompt tokens. Longer prompts raise an error.
      stop_strings: If the text of a stop token contains one of these strings, the characters before the string belong
        to the response.
      vocab_size: Number of rows of the policy's embedding. Token ids outside the range 0 to `vocab_size - 1` in
        prompts, replies and completions raise an error. The default exceeds the size of every vocabulary.
      episode_timeout_seconds: Maximum time in seconds of the calls of an episode, see `Environments`.
      grading_timeout_seconds: Maximum time in seconds of a user's reward or judge, see `grading.grade_groups`.
      environment_workers: Number of processes that run environments, see `Environments`.
      environment_memory_gb: Memory limit of each of these processes.
      omits_failed_requests: Whether a problem whose request the servers reject is omitted, like a problem whose
        environment failed, instead of raising an error.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        max_prompt_tokens: int,
        stop_strings: Sequence[str] = (),
        vocab_size: int = np.iinfo(np.int32).max,
        episode_timeout_seconds: float = 120.0,
        grading_timeout_seconds: float = 600.0,
        environment_workers: int = 0,
        environment_memory_gb: float = 4.0,
        omits_failed_requests: bool = False,
    ):
        self.sampler, self._stop_strings, self._vocab_size = sampler, stop_strings, vocab_size
        self._tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens
        self.grading_timeout_seconds, self._omits_failed_requests = grading_timeout_seconds, omits_failed_requests
        self._token_text = functools.cache(lambda token_id: str(tokenizer.decode([token_id])))
        self.environments = (
            Environments(task, episode_timeout_seconds, environment_workers, environment_memory_gb)
            if isinstance(task, Interactive)
            else None
        )
        self._max_reply_tokens = maximum_reply(task)
        self._conversations: set[asyncio.Task[Group]] = set()
        # Number of characters of prompts and replies that the tokenizer cannot encode. Evaluations are counted apart.
        self._num_replaced = Counter[bool]()

    async def push_weights(self, params: Params, version: int) -> None:
        """Pushes new weights to the sampler, after all multi-turn generations in progress are complete.

        Args:
          params: All weights of the policy, see `Sampler.push_weights`.
          version: Number of training steps that produced the weights.
        """
        with waiting():
            while running := [conversation for conversation in self._conversations if not conversation.done()]:
                await asyncio.wait(running)
        await self.sampler.push_weights(params, version)

    async def sleep(self) -> None:
        """Frees the sampler's memory, if supported. Nothing may be generated until weights are pushed."""
        if isinstance(self.sampler, SupportsSleep):
            await self.sampler.sleep()

    def metrics(self) -> Metrics:
        """Returns the number of replaced characters since the last call, if it is above 0, see `EVALUATES`."""
        count = self._num_replaced.pop(EVALUATES.get(), 0)
        return {"rollouts/replaced_characters": float(count)} if count else {}

    async def generate(
        self, problems: Sequence[Problem], num_generations: int, sampling: Sampling
    ) -> AsyncGenerator[Group, None]:
        """Yields a group for each problem, as soon as its last generation is complete.

        Responses on which the environment failed repeatedly are missing from their group, see `Group.failures`.

        Args:
          problems: Problems whose prompts are completed.
          num_generations: Number N of generations per problem.
          sampling: Sampling parameters. `max_tokens` limits the entire response, including replies.

        Raises:
          ValueError: If a prompt is empty, is longer than `max_prompt_tokens` or cannot be encoded (see
            `encode_prompts`), a token is not in the policy's embedding, a log-probability is not finite, or the reply
            or outcome of an episode is invalid.
          RuntimeError: If a completion is missing, or the weights changed between two turns of a generation.
        """
        prompts = self._encode(problems)
        async with contextlib.aclosing(TurnQueue(self.sampler, sampling, len(prompts) * num_generations)) as queue:
            running = [
                asyncio.create_task(self._generate(Turns(queue, problem, ids, seeds, place * num_generations)))
                for place, (problem, ids) in enumerate(zip(problems, prompts, strict=True))
                for seeds in [generation_seeds(sampling.seed, problem, num_generations)]
            ]
            if self.environments is not None:
                self._conversations.update(running)
            try:
                for completed in asyncio.as_completed(running):
                    group = await completed
                    for failure in (one for one in group.failures.values() if one.kind != "server"):
                        warn_repeatedly(
                            "environment",
                            f"The environment failed repeatedly. {failure.reason}. The response is masked."
                            + (failure.traceback_file and f" A traceback is in {failure.traceback_file}."),
                        )
                    yield group
                queue.warn_about_room()
            finally:
                await cancel_all(running)
                self._conversations.difference_update(running)

    async def _generate(self, turns: Turns) -> Group:
        """Generates a group. Each episode begins as soon as its first turn is complete."""
        first, results = turns.first(), dict[int, Generation | EnvironmentFailure]()
        episodes: dict[int, asyncio.Task[Generation | EnvironmentFailure]] = {}
        try:
            for _ in turns.seeds:
                completion = await first.next()
                generation = self._append_completion(turns.problem, None, completion)
                if self.environments is None:
                    results[completion.index] = generation
                else:
                    play = self._play(self.environments, turns, completion.index, generation)
                    episodes[completion.index] = asyncio.create_task(play)
            results |= zip(episodes, await asyncio.gather(*episodes.values()), strict=True)
        except BaseException as error:
            await cancel_all(episodes.values())
            if not (self._omits_failed_requests and isinstance(error, RequestError)):
                raise
            failure = EnvironmentFailure("server", str(error))
            return Group(turns.problem, turns.prompt_ids, (), dict.fromkeys(range(len(turns.seeds)), failure))
        found = sorted(results.items())
        generations = tuple(one for _, one in found if isinstance(one, Generation))
        return Group(
            turns.problem,
            turns.prompt_ids,
            generations,
            {index: one for index, one in found if isinstance(one, EnvironmentFailure)},
        )

    async def _play(
        self, environments: Environments, turns: Turns, index: int, first: Generation
    ) -> Generation | EnvironmentFailure:
        """Plays the episode of a generation after its first turn."""
        lacks_room = False

        async def take_turn(before: Generation, reply: str) -> Generation:
            nonlocal lacks_room
            before = await self._append_reply(turns, before, reply)
            if lacks_room := before.finish_reason == "length":
                return before
            return self._append_completion(turns.problem, before, await turns.next(index, before))

        result = await environments.play(turns.problem, turns.episode_seed(index), first, take_turn)
        lacks_room = lacks_room and isinstance(result, Generation)
        environments.count("no_room", lacks_room)
        turns.queue.end(lacks_room)
        return result

    def _encode(self, problems: Sequence[Problem]) -> list[Int[np.ndarray, " L"]]:
        prompts = encode_prompts(self._tokenizer, problems, self._vocab_size)
        self._num_replaced[EVALUATES.get()] += sum(len(SURROGATE.findall(problem.prompt)) for problem in problems)
        for problem, ids in zip(problems, prompts, strict=True):
            if not len(ids):
                raise ValueError(f"The prompt of problem {problem.id!r} is empty; remove the problem.")
            if len(ids) > self.max_prompt_tokens:
                raise ValueError(
                    f"The prompt of problem {problem.id!r} has {len(ids)} tokens, more than "
                    f"train.max_prompt_tokens={self.max_prompt_tokens}; raise it, or remove the problem."
                )
        return prompts

    def _append_completion(self, problem: Problem, before: Generation | None, completion: Completion) -> Generation:
        """Appends a completion to the previous turns. If it ended by "stop", its last token is the stop token."""
        ids = completion.token_ids
        if not np.isfinite(completion.logprobs).all():
            raise ValueError(
                f"The sampler's log-probabilities for problem {problem.id!r} are not finite; check its "
                "weights and sampling.temperature."
            )
        if ((ids < 0) | (ids >= self._vocab_size)).any():
            raise ValueError(
                f"The sampler returned token ids outside the range 0 to {self._vocab_size - 1} for problem "
                f"{problem.id!r}; check that it samples from the trained model."
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
                f"The weights changed from version {version} to {new} between two turns of problem {problem.id!r}; "
                "push weights with Rollouts.push_weights only."
            )
        return _concatenate(before, written)

    def _text(self, token_ids: Any, finish_reason: FinishReason) -> str:
        if finish_reason != "stop":
            return str(self._tokenizer.decode(token_ids))
        return str(self._tokenizer.decode(token_ids[:-1])) + text_before(
            self._token_text(int(token_ids[-1])), self._stop_strings
        )

    async def _append_reply(self, turns: Turns, before: Generation, reply: str) -> Generation:
        """Appends a reply. If it leaves no tokens or no turn for the policy, the response ends instead.

        Raises:
          FailedEpisode: If the reply has more than `max_reply_tokens` tokens of the task.
        """
        problem, sampling, limit = turns.problem, turns.queue.sampling, self._max_reply_tokens
        stop_text, room = self._token_text(int(before.token_ids[-1])), sampling.max_tokens - len(before.token_ids)
        arguments = (self._tokenizer, reply, problem.chat, stop_text, self._vocab_size, max(room, limit or 0))
        # In a thread, a long reply does not delay the trainer or its shutdown.
        reply, count, ids = await in_daemon_thread(lambda: encode_reply(*arguments))
        self._num_replaced[EVALUATES.get()] += count
        if limit is not None and len(ids) > limit:
            raise FailedEpisode("long", f"A reply of problem {problem.id!r} exceeds max_reply_tokens={limit}")
        if len(ids) >= room or len(before.turns) // 2 + 1 >= sampling.max_turns:
            return dataclasses.replace(before, finish_reason="length")
        logprobs, mask = np.zeros(len(ids), np.float32), np.zeros(len(ids), bool)
        return _concatenate(
            before,
            Generation(ids, logprobs, mask, (reply,), "stop", np.full(len(ids), before.weight_versions[-1])),
        )


def generation_seeds(seed: int, problem: Problem, num_generations: int) -> UInt32[np.ndarray, " N"]:
    """Derives one seed per generation. Seeds do not depend on the other problems of the batch.

    Args:
      seed: Seed of the batch, `Sampling.seed`.
      problem: The problem. Its id is mixed into the seeds and, unless `occurrence` is 0, its `occurrence`.
      num_generations: Number N of generations. The seeds of a smaller N are a prefix of those of a larger N,
        but correlated generations also depend on N, see `embedded.token_sampling.group_lattice`.

    Returns:
      Seeds [N], uint32.
    """
    words = np.frombuffer(hashlib.sha256(problem.id.encode(errors="surrogatepass")).digest(), np.uint32).tolist()
    again = [problem.occurrence] if problem.occurrence else []
    return np.random.SeedSequence([seed, *words, *again]).generate_state(num_generations)


def _concatenate(first: Generation, second: Generation) -> Generation:
    return Generation(
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.logprobs, second.logprobs]),
        np.concatenate([first.loss_mask, second.loss_mask]),
        (*first.turns, *second.turns),
        second.finish_reason,
        np.concatenate([first.weight_versions, second.weight_versions]),
    )
