"""A sampler whose completions depend on prompt and seed, and a task whose episodes have state."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

import numpy as np
from fakes import Scripted, collect

from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.rollouts.grading import grade_groups
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.types import Completion, Generation, Group, Outcome, Problem, Request, Sampling

ALPHABET = "abcdxyz?:0123456789"
PROBLEMS = [Problem(name, f"{name}:", "") for name in "abc"]
N, MAX_TOKENS = 8, 40


class ByHash(Scripted):
    """Writes a letter that depends on the seed and the prompt, with log-probabilities that depend on both."""

    def __init__(self):
        super().__init__(lambda request, index: "", ALPHABET)

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        for place, request in enumerate(requests):
            for index, seed in enumerate(request.seeds.tolist()):
                ids, logprobs = spoken(request.prompt_ids, seed)
                limit = request.max_tokens
                reason = "stop" if len(ids) <= limit else "length"
                versions = np.full(len(ids[:limit]), self.version, np.int32)
                yield Completion(place, index, ids[:limit], logprobs[:limit], reason, versions)


class Concurrent(ByHash):
    """Accepts concurrent calls."""

    accepts_concurrent_calls: Literal[True] = True


def spoken(prompt_ids: Sequence[int] | np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a letter with the stop token, and their log-probabilities."""
    rng = np.random.default_rng([seed, len(prompt_ids), int(np.sum(prompt_ids))])
    return np.array([rng.integers(2, 6), 1], np.int32), -rng.exponential(size=2).astype(np.float32)


class Sums:
    """Replies with the running sum of all letters and the seed, until the sum is divisible by 4 or exceeds 40."""

    def __init__(self, task: "SumTask", seed: int):
        self.task, self.total, self.turns, self.closed = task, seed % 10, [], 0

    async def reply(self, generation: Generation) -> str | None:
        await self.task.pause()
        self.turns.append(generation.turns[-1])
        assert generation.turns[::2] == tuple(self.turns), "turns of another episode"
        self.total += ALPHABET.index(generation.turns[-1]) + 1
        await self.task.pause()
        return None if self.total % 4 == 0 or self.total > 40 else f"?{self.total}"

    async def close(self) -> Outcome:
        self.closed += 1
        await self.task.pause()
        return Outcome(
            float(self.total % 4 == 0), self.turns[0] if self.turns else None, metrics={"sum": float(self.total)}
        )


class SumTask:
    """Starts episodes of `Sums`, whose methods take random times up to `delay` seconds."""

    train_problems: Sequence[Problem] = PROBLEMS
    held_out_problems: Sequence[Problem] = PROBLEMS

    def __init__(self, delay: float = 0.0):
        self.delay, self.episodes, self._rng = delay, [], np.random.default_rng()

    async def pause(self) -> None:
        if self.delay:
            await asyncio.sleep(self._rng.uniform(0, self.delay))

    def start(self, problem: Problem, seed: int) -> Any:
        self.episodes.append(Sums(self, seed))
        return self.episodes[-1]


def play(task: Any, sampler: Scripted | None = None, **settings: Any) -> list[Group]:
    sampler = sampler or ByHash()
    rollouts = Rollouts(sampler, sampler.tokenizer, task, 8, episode_timeout_seconds=settings.pop("timeout", 60.0))
    return collect(rollouts, PROBLEMS, N, Sampling(**dict[str, Any]({"max_tokens": MAX_TOKENS} | settings)))


def graded(groups: Sequence[Group], task: Any) -> list[Any]:
    async def stream():
        for group in groups:
            yield group

    return asyncio.run(grade_groups(stream(), PROBLEMS, task, ExactJudge(task)))
