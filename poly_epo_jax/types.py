"""The nouns that travel through a training step, and the three seams where a user plugs in.

`Problem -> Group of N Generations -> GradedGroup (rewards, clusters)`; everything after that is arrays.
"""

import dataclasses
import hashlib
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

Params = dict[str, Any]
"""A policy's weights: a nested dict of arrays, the state of `model.qwen3.Qwen3`."""

DEGENERATE_CLUSTER = 100
"""Cluster of generations that are no attempt at reasoning (paper appendix, LM-Judge and Diversity Function)."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One task instance: `prompt` is the text the policy reads, `answer` whatever the task checks against."""

    id: str
    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """One response y_i of T tokens, as the sampler produced it.

    `token_ids` and `logprobs` [T] include the stop token, `text` does not. `logprobs` are log-softmax(logits /
    temperature) of the chosen tokens, not renormalised for top-p or top-k. `weight_version` is the number of training
    steps that the sampling weights had seen.
    """

    token_ids: Int[np.ndarray, "T"]
    logprobs: Float[np.ndarray, "T"]
    text: str
    finish_reason: Literal["stop", "length"]
    weight_version: int


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A prompt x and its N generations."""

    problem: Problem
    prompt_ids: Int[np.ndarray, "L"]
    generations: tuple[Generation, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Clustering:
    """Cluster ids [N], `DEGENERATE_CLUSTER` for what is no attempt at reasoning; why, where the judge says."""

    ids: Int[np.ndarray, "N"]
    rationales: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class JudgeFailure:
    """A judge that could not cluster a group says why. There is never an invented clustering in its place.

    `kind` is one word, by which failures are counted; `reason` a sentence.
    """

    kind: str
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class GradedGroup:
    """A group with its rewards [N] and its clustering, or the reason why it has none."""

    group: Group
    rewards: Float[np.ndarray, "N"]
    clustering: Clustering | JudgeFailure

    @property
    def correct(self) -> Bool[np.ndarray, "N"]:
        """Which generations solve the problem."""
        return self.rewards == 1


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to draw generations. `top_p` 1 and `top_k` 0 switch their filters off; `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def generation_seeds(self, problem: Problem, num_generations: int) -> UInt32[np.ndarray, "N"]:
        """Each generation's own seed, the same whatever other problems are generated for beside this one."""
        words = np.frombuffer(hashlib.sha256(problem.id.encode()).digest(), np.uint32)
        return np.random.SeedSequence([self.seed, *words.tolist()]).generate_state(num_generations)


@runtime_checkable
class Rollouts(Protocol):
    """Where generations come from."""

    def generate(self, problems: Sequence[Problem], num_generations: int, sampling: Sampling) -> AsyncIterator[Group]:
        """Yields one Group per problem as each completes, in any order."""
        ...

    async def update_weights(self, params: Params, version: int) -> None:
        """From here on generations come from `params`, the policy after `version` training steps."""
        ...

    def close(self) -> None:
        """Frees what the sampler holds."""
        ...


@runtime_checkable
class Judge(Protocol):
    """Clusters the generations of one prompt by reasoning strategy (paper §4)."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        """Which generations share a strategy, or why that could not be told."""
        ...


@runtime_checkable
class Task(Protocol):
    """Problems and their verifiable reward."""

    train_problems: Sequence[Problem]
    held_out_problems: Sequence[Problem]

    def reward(self, problem: Problem, text: str) -> float:
        """r(x, y) in [0, 1]."""
        ...

    def strategy(self, problem: Problem, text: str) -> Hashable | None:
        """What the exact judge clusters by: equal for responses of one strategy, None for degenerate ones.

        Raises:
          NotImplementedError: the task has no exact clustering; use a judge that reads the responses.
        """
        ...


@runtime_checkable
class Voting(Task, Protocol):
    """A task whose responses give answers that can be voted on."""

    def answer(self, problem: Problem, text: str) -> str | None:
        """The answer that the response gives, if it gives one."""
        ...

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        """Whether two answers are one vote."""
        ...


@runtime_checkable
class Served(Protocol):
    """A judge that depends on a server."""

    async def wait_until_ready(self) -> None:
        """Returns once the server answers; called before the first step."""
        ...


@runtime_checkable
class Counting(Protocol):
    """A task, judge or sampler that counts what it had to mend or give up; the counts go to the step's metrics."""

    def metrics(self) -> dict[str, float]:
        """The counts since the last call."""
        ...


Metrics = dict[str, float]
