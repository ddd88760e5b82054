"""The types that pass through a training step, and the three interfaces that users implement: Sampler, Task, Judge.

`Problem -> Group of N Generations -> GradedGroup (rewards, clusters)`; everything after that is arrays.
"""

import dataclasses
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

Params = dict[str, Any]
"""A policy's weights: a nested dict of arrays, the state of `model.qwen3.Qwen3`."""

DEGENERATE_CLUSTER = 100
"""The cluster of generations that are no attempt at reasoning (paper appendix, LM-Judge and Diversity Function)."""


FinishReason = Literal["stop", "length"]
"""A stop token ended the response, or its token limit did."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One task instance: `prompt` is the text the policy reads, `answer` whatever the task checks against.

    If `chat` is true, `prompt` is a user's message, which the tokenizer's own chat template turns into that text.
    `occurrence` counts, from 0, the problem's earlier occurrences in the batch: at the end of an epoch a batch may hold
    it twice. Both are the same problem, but have different generations.
    """

    id: str
    prompt: str
    answer: str
    chat: bool = False
    occurrence: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """One response y_i of T tokens, in one turn or several.

    `loss_mask` [T] marks what the policy wrote and may be trained on; the rest are the task's replies, whose logprobs
    are 0. `token_ids` and `logprobs` [T] include the stop token of each of the policy's turns; `text` does not, except
    for the part of that token's text before a stop string.
    `logprobs` are log-softmax(logits / temperature) of the chosen tokens, not renormalised for top-p or top-k: with
    either of these, a generation is for evaluation only.
    `turns` are the policy's text, the task's reply, the policy's next text and so on. `weight_version` is the number of
    training steps that the sampling weights had seen.
    """

    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    turns: tuple[str, ...]
    finish_reason: FinishReason
    weight_version: int

    @property
    def text(self) -> str:
        """All turns, one after the other."""
        return "".join(self.turns)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A prompt x and its N generations."""

    problem: Problem
    prompt_ids: Int[np.ndarray, " L"]
    generations: tuple[Generation, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Clustering:
    """Cluster ids [N], `DEGENERATE_CLUSTER` for what is no attempt at reasoning; and the judge's reasons, if any.

    `features` are arrays [N, ...] by name, such as embeddings, that the judge adds for advantage estimators.
    """

    ids: Int[np.ndarray, " N"]
    rationales: tuple[str, ...] | None = None
    features: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class JudgeFailure:
    """Why a judge could not cluster a group. A clustering is never invented in its place.

    `kind` is one word, by which failures are counted; `reason` is a sentence.
    """

    kind: str
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class GradedGroup:
    """A group with its rewards [N], which of them count as correct [N], and its clustering or why it has none.

    `clustering` is None if no judge is asked for one.
    """

    group: Group
    rewards: Float[np.ndarray, " N"]
    correct: Bool[np.ndarray, " N"]
    clustering: Clustering | JudgeFailure | None


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample. `top_p` 1 and `top_k` 0 switch their filters off; `temperature` 0 is greedy.

    `max_tokens` bounds a whole response, the task's replies included.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt of L tokens to be completed N times, once with each seed, by at most `max_tokens` tokens each.

    A completion depends on its prompt and seed, not on what is sampled alongside it. `problem_id` is for messages.
    """

    problem_id: str
    prompt_ids: Int[np.ndarray, " L"]
    seeds: UInt32[np.ndarray, " N"]
    max_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """The completion of one seed: `request` is the index of its request, `index` that of its seed; see Generation."""

    request: int
    index: int
    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    finish_reason: FinishReason
    weight_version: int


@runtime_checkable
class Sampler(Protocol):
    """Where completions come from: token ids in, token ids out."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yields every completion of every request, in any order. Those of one call are from weights of one version.

        `sampling` says how tokens are sampled; the requests say how many, and with which seeds.
        """
        ...

    async def push_weights(self, params: Params, version: int) -> None:
        """Makes subsequent `sample` calls use new weights.

        Args:
          params: All weights of the policy, trainable and frozen.
          version: Number of training steps that produced the weights.
        """
        ...

    def close(self) -> None:
        """Frees what the sampler holds."""
        ...


@runtime_checkable
class Judge(Protocol):
    """Clusters the generations of one prompt by reasoning strategy (paper §4)."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure | None:
        """Which generations share a strategy, or why that could not be determined; None from the judge `none`."""
        ...


@runtime_checkable
class Task(Protocol):
    """Problems and their verifiable reward. The protocols below describe what else a task may offer."""

    train_problems: Sequence[Problem]
    held_out_problems: Sequence[Problem]

    def reward(self, problem: Problem, generation: Generation) -> float:
        """r(x, y) in [0, 1]."""
        ...


@runtime_checkable
class PartialCredit(Task, Protocol):
    """A task whose responses count as correct from a reward of `correct_from` on; for other tasks, from 1 on."""

    correct_from: float


@runtime_checkable
class Strategic(Task, Protocol):
    """A task that knows the strategies of its responses."""

    def strategy(self, problem: Problem, generation: Generation) -> Hashable | None:
        """A value that is equal for responses of one strategy; None for what is no attempt."""
        ...


@runtime_checkable
class Voting(Task, Protocol):
    """A task whose responses give answers that can be compared."""

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """The answer that the response gives, if it gives one."""
        ...

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        """Whether two answers count as the same vote."""
        ...


@runtime_checkable
class Conversational(Task, Protocol):
    """A task of several turns: it replies to what the policy wrote, and the policy continues."""

    def reply(self, problem: Problem, generation: Generation) -> str | None:
        """The exact text that the policy reads next, control tokens included; None if the response is complete."""
        ...


@runtime_checkable
class Served(Protocol):
    """A judge that depends on a server."""

    async def wait_until_ready(self) -> None:
        """Returns once the server answers; called before the first step."""
        ...


@dataclasses.dataclass(frozen=True)
class JudgeLoad:
    """The most that a judge is shown at once: how many responses, and how many tokens in the prompt and in each."""

    num_responses: int
    prompt_tokens: int
    response_tokens: int


@runtime_checkable
class Limited(Protocol):
    """A judge that can read and write only a limited amount."""

    async def shortfalls(self, load: JudgeLoad) -> list[str]:
        """What would not fit, one sentence each; called before the first step."""
        ...


@runtime_checkable
class Sleeping(Protocol):
    """A sampler that can give up its memory for the update."""

    async def sleep(self) -> None:
        """Called when a batch is complete; the sleep ends when weights are pushed. Nothing is sampled in between."""
        ...


@runtime_checkable
class Counting(Protocol):
    """A task, judge or sampler that counts what it retried or gave up; the counts go to the step's metrics."""

    def metrics(self) -> dict[str, float]:
        """The counts since the last call."""
        ...


Metrics = dict[str, float]


Part = TypeVar("Part")


class Registry(dict[str, Part]):
    """A dict in which a taken name cannot be given to another part, as runs that name it would silently change."""

    def __setitem__(self, name: str, part: Part) -> None:
        """Registers a part.

        Raises:
          ValueError: the name is taken.
        """
        if name in self:
            raise ValueError(f"There is a part named {name!r} already; choose another name than {', '.join(self)}.")
        super().__setitem__(name, part)
