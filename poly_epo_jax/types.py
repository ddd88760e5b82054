"""Core data types of a training step, and the protocols that users implement: `Sampler`, `Task` and `Judge`.

A step turns each `Problem` into a `Group` of N generations, and then into a `GradedGroup` with rewards and clusters.
Advantages and updates are computed from arrays of these values.
"""

import dataclasses
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

Params = dict[str, Any]
"""Weights of a policy: the state of `model.transformer.Transformer` as a nested dict of arrays."""

DEGENERATE_CLUSTER = 100
"""Cluster id of degenerate responses: responses without reasoning (paper appendix, LM-Judge and Diversity Function)."""


FinishReason = Literal["stop", "length"]
"""Reason for the end of a response: "stop" for a stop token, "length" for the token limit."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of a task.

    Attributes:
      id: Unique name of the problem within its task.
      prompt: Text that the policy completes or, if `chat` is True, the user message of a chat.
      answer: Reference answer, in the format that the task's reward expects.
      chat: Whether the chat template of the tokenizer is applied to `prompt`. The names of control tokens in a chat
        message, such as "<|im_end|>", are encoded as plain text.
      occurrence: Number of earlier occurrences of the problem in the step or, with `train.staleness`, in the queue. A
        step that spans the end of an epoch may draw a problem repeatedly. The occurrences compare equal, but have
        different generations.
      untrusted: Start and end, in characters, of the part of a prompt without `chat` that comes from a dataset. In this
        part, the names of control tokens are encoded as plain text. In the remaining prompt, they are encoded as
        control tokens. (0, 0) marks no part.
      tools: Definitions of tools as JSON schemas, which the chat template inserts into the prompt. Requires `chat`.
      columns: Further columns of the dataset, which reward functions receive by name.
      system: System message before `prompt`. Requires `chat`. `task.system_prompt` replaces it.
      source: Name of the dataset, see `Mixed`.
    """

    id: str
    prompt: str
    answer: str
    chat: bool = False
    occurrence: int = dataclasses.field(default=0, compare=False)
    untrusted: tuple[int, int] = (0, 0)
    tools: Sequence[Mapping[str, Any]] = dataclasses.field(default=(), hash=False)
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    system: str = ""
    source: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """A response y_i of T tokens, in one or several turns.

    Attributes:
      token_ids: Tokens of all turns, including the stop token of each of the policy's turns.
      logprobs: Log-probabilities of the tokens, in nats: log-softmax(logits / temperature), not renormalized for top-p
        or top-k. Generations sampled with top-p or top-k can therefore be used for evaluation only. 0 for tokens of the
        environment's replies.
      loss_mask: True for tokens that the policy generated, which can be trained on, and False for the tokens between
        two of its turns.
      turns: Alternating texts of the policy and the environment, starting with the policy. The policy's texts do not
        contain stop tokens, except for the part of a stop token's text before a stop string.
      finish_reason: Reason for the end of the last turn. In an episode, "stop" means that the environment ended it, and
        "length" that it reached the limit of tokens or turns.
      weight_versions: Version of the weights that sampled each token: the number of training steps that produced them.
        Tokens between two turns have the version of the token before them.
      outcome: Outcome of the episode. None if the task is not `Interactive`.
    """

    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    turns: tuple[str, ...]
    finish_reason: FinishReason
    weight_versions: Int[np.ndarray, " T"]
    outcome: "Outcome | None" = None

    @classmethod
    def from_turns(cls, *turns: str, version: int = 0, outcome: "Outcome | None" = None) -> "Generation":
        """Creates a generation from text alone, for tasks and judges, which do not read tokens.

        Args:
          *turns: Texts of the turns.
          version: Weight version of the single placeholder token.
          outcome: Outcome of the episode.
        """
        arrays = np.zeros(1, np.int32), np.zeros(1, np.float32), np.ones(1, bool)
        return cls(*arrays, turns, "stop", np.full(1, version), outcome)

    @property
    def text(self) -> str:
        """Concatenated text of all turns."""
        return "".join(self.turns)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of an episode.

    The reward of an episode that reached the limit of tokens or turns is 0, and the episode is not correct.

    Attributes:
      reward: Reward r(x, y) in [0, 1].
      strategy: Value that is equal for episodes with the same strategy, or None for a degenerate episode or if the
        environment does not determine strategies. If any outcome of a task has a strategy, use the judge `exact`.
      correct: Whether the episode counts as correct. If None, it is correct if the reward is at least the task's
        `correct_from`, which is 1 by default.
      metrics: Values by name, whose means over the episodes of a step are logged as `episode/NAME`.
    """

    reward: float
    strategy: Hashable | None = None
    correct: bool | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class EpisodeFailure(Exception):
    """Raised by an environment that failed for a reason other than the policy's turns.

    The episode is repeated with the same seed. If it fails repeatedly, the response is counted as failed, and is not
    trained on. Invalid or overlong turns of the policy are not failures of the environment: reply with an error
    message, or end the episode with a low reward.
    """


@dataclasses.dataclass(frozen=True)
class EnvironmentFailure:
    """The reason why a response is masked: its episode failed repeatedly, or the reward of a user failed.

    Attributes:
      kind: One word, under which the failure is counted in the metrics: "failed" for `EpisodeFailure`, "raised" for
        other exceptions, "late" for calls that exceed `rollouts.episode_timeout_seconds` or
        `rollouts.grading_timeout_seconds`, "long" for a reply with more than `max_reply_tokens` tokens, and "lost" for
        a call that ended its worker process, for example because of its memory limit.
      reason: One sentence that describes the failure.
      traceback_file: File of the traceback of an exception, or an empty string. It is printed but not recorded, because
        its name differs between runs.
    """

    kind: str
    reason: str
    traceback_file: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A prompt x and its generations.

    Attributes:
      problem: The problem.
      prompt_ids: Token ids of the prompt.
      generations: The M of N generations on which neither the environment nor the reward failed, in the order of their
        indices. Before grading, only the environment can have failed.
      failures: The failures of the other generations, by index from 0 to N - 1.
    """

    problem: Problem
    prompt_ids: Int[np.ndarray, " L"]
    generations: tuple[Generation, ...]
    failures: Mapping[int, EnvironmentFailure] = dataclasses.field(default_factory=dict)

    @property
    def indices(self) -> list[int]:
        """Indices of `generations` among the N generations."""
        return [index for index in range(len(self.generations) + len(self.failures)) if index not in self.failures]


@dataclasses.dataclass(frozen=True, eq=False)
class Clustering:
    """The clusters of the generations of a group.

    Attributes:
      ids: Cluster ids, `DEGENERATE_CLUSTER` for degenerate responses. Ids have a meaning only within their group. Use
        `judges.exact.clusters_of` to number clusters from 0, because it skips `DEGENERATE_CLUSTER`.
      rationales: The judge's reason for each id, or None if the judge gives none.
      features: Arrays [N, ...] by name, such as embeddings, which the judge adds for advantage estimators.
    """

    ids: Int[np.ndarray, " N"]
    rationales: tuple[str, ...] | None = None
    features: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class JudgeFailure:
    """The result of a judge that failed to cluster a group. `judge.on_failure` selects the use of the group.

    Attributes:
      kind: One word, under which the failure is counted in the metrics.
      reason: One sentence that describes the failure.
    """

    kind: str
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class GradedGroup:
    """A group with its rewards and clusters.

    Attributes:
      group: The group.
      rewards: Rewards of the M generations in [0, 1]. Empty if the group is left out, because M is too small.
      correct: Whether each generation counts as correct.
      clustering: The clustering, the failure of the judge, or None if the judge does not cluster.
      parts: Parts of the rewards [N] by name, in [0, 1], and NaN where a part is None. Empty unless the task
        `HasRewards`.
    """

    group: Group
    rewards: Float[np.ndarray, " M"]
    correct: Bool[np.ndarray, " M"]
    clustering: Clustering | JudgeFailure | None
    parts: Mapping[str, Float[np.ndarray, " N"]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
      max_tokens: Maximum number of tokens of a response, including the environment's replies.
      temperature: Sampling temperature. 0 selects greedy decoding.
      top_p: Cumulative probability of the tokens that are sampled from. 1 disables the filter.
      top_k: Number of most probable tokens that are sampled from. 0 disables the filter.
      max_turns: Maximum number of the policy's turns in an episode.
      seed: Seed from which the seed of each completion is derived.
      correlated: Whether the completions of a request are spread evenly over the policy's distribution. Only supported
        by the embedded sampler without filters.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_turns: int = 64
    seed: int = 0
    correlated: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt of L tokens and the seeds of its N completions.

    A completion depends only on its prompt and seed, not on other completions that are sampled at the same time.

    Attributes:
      problem_id: Id of the problem, for messages.
      prompt_ids: Token ids of the prompt.
      seeds: One seed per completion.
      max_tokens: Maximum number of tokens of a completion.
      cache_salt: Servers share cached keys and values only between requests with the same value.
    """

    problem_id: str
    prompt_ids: Int[np.ndarray, " L"]
    seeds: UInt32[np.ndarray, " N"]
    max_tokens: int
    cache_salt: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """The completion of a prompt with one seed.

    Attributes:
      request: Index of the request.
      index: Index of the seed within the request.
      token_ids: Sampled tokens, see `Generation`.
      logprobs: Log-probabilities of the tokens, see `Generation`.
      finish_reason: Reason for the end of the completion.
      weight_versions: Version of the weights that sampled each token, see `Generation`.
    """

    request: int
    index: int
    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    finish_reason: FinishReason
    weight_versions: Int[np.ndarray, " T"]


@runtime_checkable
class Sampler(Protocol):
    """Samples completions in token ids for prompts in token ids."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yields all completions of all requests, in any order.

        Samplers that do not support `rollouts.in_flight` generate all completions of a call with the same weights.

        Args:
          requests: Prompts, seeds and token limits.
          sampling: Temperature, top-p, top-k, and the maximum number of tokens of any completion. The seeds and the
            token limit of each completion are those of its request.
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
        """Releases the resources of the sampler."""
        ...


@runtime_checkable
class Judge(Protocol):
    """Clusters the generations of one prompt by reasoning strategy (paper §4)."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure | None:
        """Returns the clustering of a group, or a failure. Only judges that do not cluster return None."""
        ...


@runtime_checkable
class Task(Protocol):
    """Problems of a task, which also is `Rewarded`, `HasRewards` or `Interactive`.

    Other protocols describe optional methods.

    Attributes:
      train_problems: Problems that are trained on.
      held_out_problems: Problems that are evaluated during training.
    """

    train_problems: Sequence[Problem]
    held_out_problems: Sequence[Problem]


@runtime_checkable
class Mixed(Task, Protocol):
    """A task that draws its training problems from several datasets.

    Attributes:
      source_weights: Relative number of prompts from each dataset, by `Problem.source`. If empty, each problem is drawn
        equally often.
    """

    source_weights: Mapping[str, float]


@runtime_checkable
class Rewarded(Task, Protocol):
    """A task with a verifiable reward of each response, which has a single turn."""

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns the reward r(x, y) in [0, 1]."""
        ...


@dataclasses.dataclass(frozen=True)
class Reward:
    """A part of the reward of a task.

    Attributes:
      function: A reward function, which may be asynchronous, or an object that is called like one, see `HasRewards`.
      weight: Weight of the part, at least 0. With weight 0, the part is logged only.
      range: Minimum and maximum of the function's values, which are rescaled to [0, 1].
      name: Name in metrics. If empty, the name of the function or of the object's class.
    """

    function: Callable[..., Any]
    weight: int | float = 1
    range: tuple[int | float, int | float] = (0, 1)
    name: str = ""


@runtime_checkable
class HasRewards(Task, Protocol):
    """A single-turn task whose reward is the weighted mean of several rewards. They replace the method `reward`.

    A reward function has the interface of TRL's reward functions. It is called for each response with the keyword
    arguments `prompts`, `completions` (texts, or lists of messages if the problem is a chat message), `completion_ids`,
    `answer`, the columns of the problem, `problems` and `generations` (as in `Rewarded.reward`). Each argument is a
    list of one value, and so is the result: a number, or None if the reward does not apply to the response. Functions
    defined with `async def` are awaited concurrently, in an event loop that is not the loop of the trainer.

    Attributes:
      rewards: The functions or `Reward`s, or one of them.
    """

    rewards: "Sequence[Callable[..., Any] | Reward] | Callable[..., Any] | Reward"


@runtime_checkable
class Episode(Protocol):
    """An environment with state, which replies to one generation of a problem. Its methods are awaited in turn.

    With `rollouts.environment_workers=0`, all episodes of a run share an event loop, which is not the loop of the
    trainer, so computations of more than a few milliseconds should run in a thread. Otherwise, each episode runs in one
    of several processes, which run one call at a time and have separate copies of the task.
    """

    async def reply(self, generation: Generation) -> str | None:
        """Returns the reply to the policy's last turn, or None if the episode has ended.

        If the problem is a chat message, the reply is the content of the next user message, in which the names of
        control tokens are encoded as plain text. Otherwise, the reply is the text that is appended to the response, in
        which they are encoded as control tokens. Apply `judges.prompt.escape_control_tokens` to parts of such a text
        that come from a response or a program.

        Args:
          generation: All turns so far. `generation.turns[-1]` is the last turn of the policy.

        Raises:
          EpisodeFailure: If the environment failed.
        """
        ...

    async def close(self) -> Outcome:
        """Releases the resources of the episode, and returns its outcome.

        Called once, also if the episode has not ended: after a failure or an interruption, in which case the outcome is
        ignored, and after the limit of tokens or turns. Not called if the event loop or worker of the episode hangs or
        has ended.

        Raises:
          EpisodeFailure: If the environment failed.
        """
        ...


@runtime_checkable
class Interactive(Task, Protocol):
    """A task in which each response is an episode of several turns. The reward is that of the episode's outcome."""

    def start(self, problem: Problem, seed: int) -> Episode:
        """Starts an episode.

        Args:
          problem: The problem, whose prompt the policy completes in its first turn.
          seed: Seed of the episode in [0, 2^32), for all of its random numbers. The N episodes of a problem have
            different seeds. A run that is resumed repeats the episodes of a step with the same seeds.

        Raises:
          EpisodeFailure: If the environment failed.
        """
        ...


@runtime_checkable
class LimitsReplies(Task, Protocol):
    """An interactive task that shortens its replies to a maximum length. Longer replies are its failures.

    Without this limit, a reply that does not fit ends the episode with reward 0, because the policy may have caused it.

    Attributes:
      max_reply_tokens: Maximum number of tokens between two turns of the policy, including those of the chat template.
        If None, replies are not limited.
    """

    max_reply_tokens: int | None


@runtime_checkable
class PartialCredit(Task, Protocol):
    """A task with partial rewards.

    Attributes:
      correct_from: Minimum reward of a correct response. It is 1 for other tasks.
    """

    correct_from: float


@runtime_checkable
class Strategic(Task, Protocol):
    """A task that determines the strategy of each response."""

    def strategy(self, problem: Problem, generation: Generation) -> Hashable | None:
        """Returns a value that is equal for responses with the same strategy, or None for a degenerate response."""
        ...


@runtime_checkable
class HasAnswers(Task, Protocol):
    """A task whose responses contain final answers. Unless the task compares answers, equal texts are equal answers."""

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the final answer of the response, or None if it has none."""
        ...


@runtime_checkable
class ComparesAnswers(HasAnswers, Protocol):
    """A task whose answers can be equal although their texts differ."""

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        """Returns True if two answers count as the same vote."""
        ...


@runtime_checkable
class ServerBacked(Protocol):
    """A judge that depends on a server."""

    async def wait_until_ready(self) -> None:
        """Waits until the server responds. Called before the first step of a run, and before an evaluation."""
        ...


@dataclasses.dataclass(frozen=True)
class JudgeLoad:
    """Size of the largest request to a judge.

    Attributes:
      num_responses: Number of responses.
      prompt_tokens: Maximum number of tokens of the problem's prompt.
      response_tokens: Maximum number of tokens of a response.
      num_turns: Maximum number of the policy's turns in a response.
    """

    num_responses: int
    prompt_tokens: int
    response_tokens: int
    num_turns: int = 1


@runtime_checkable
class CapacityChecked(Protocol):
    """A judge with limits on the size of requests and replies."""

    async def capacity_warnings(self, load: JudgeLoad) -> list[str]:
        """Returns one sentence per limit that the load exceeds.

        Called before the first step of a run, and before an evaluation.
        """
        ...


@runtime_checkable
class Identified(Protocol):
    """A judge whose clusters depend on a model of a server or on files."""

    async def identity(self) -> dict[str, str]:
        """Returns names of models and SHA-256 digests of files, by configuration key.

        Called after the server has responded. Runs and evaluations record these values, and are only resumed if they
        are equal.
        """
        ...


@runtime_checkable
class SupportsSleep(Protocol):
    """A sampler that can release its memory during the update."""

    async def sleep(self) -> None:
        """Releases memory after a batch is complete. No samples are requested until the next `push_weights` call."""
        ...


@runtime_checkable
class ConcurrentCalls(Protocol):
    """A sampler whose `sample` method can be called while other calls are in progress, without waiting for them.

    Attributes:
      accepts_concurrent_calls: Always True.
    """

    accepts_concurrent_calls: Literal[True]


@runtime_checkable
class HasMetrics(Protocol):
    """A task, judge or sampler with counters, such as retries, which are logged with the metrics of a step."""

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the last call."""
        ...


Metrics = dict[str, float]
"""Values by name, such as `eval/reward`."""
