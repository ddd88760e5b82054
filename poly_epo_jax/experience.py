"""Generates, grades and judges the batch of each training step.

Prompts are drawn in rounds (`rollouts.rounds`), and wait in a queue until a batch takes their groups in data order. A
batch draws a round if the queue has too few prompts. With `train.refill`, it draws further rounds until enough prompts
have an advantage other than 0.

With `train.staleness=k`, rounds are also started when a batch is complete, until the queue has k times
`train.prompts_per_batch` prompts, which are generated while the policy is trained. Each batch takes at least
`train.prompts_per_batch` of them in data order, so the weights of a group are at most k steps old, and no group is
discarded because it takes long. The content of a batch does not depend on the time that any group takes.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from poly_epo_jax.config.keys import Config, max_draws
from poly_epo_jax.judges.capacity import warn_capacity
from poly_epo_jax.parallel import hosts
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.rollouts.grading import (
    check_failed_environments,
    check_failed_fraction,
    complete_groups,
    environment_failures,
    left_out_groups,
    usable_groups,
)
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import ProblemOrder
from poly_epo_jax.rollouts.rounds import Rounds
from poly_epo_jax.step.advantages import AdvantageFunction, has_signal, make_estimator
from poly_epo_jax.step.partial_groups import group_advantages, min_group
from poly_epo_jax.step.step_metrics import mean_length
from poly_epo_jax.system.signals import StopSignal
from poly_epo_jax.types import (
    GradedGroup,
    Interactive,
    Judge,
    JudgeLoad,
    Metrics,
    Problem,
    Sampling,
    ServerBacked,
    Task,
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The graded groups of one training step.

    Attributes:
      graded: Graded groups, in data order. With `train.refill`, they end with the last group that is trained on. Later
        groups remain in the queue. With `train.staleness=0`, they are discarded, and their problems are drawn again.
      left_out: Groups that failures of the environment or reward leave out, see `rollouts.min_group`.
      usable: Groups for the update, see `grading.usable_groups`, without those that are older than `train.staleness`.
      advantages: Advantages [P, N] of the P usable groups, see `group_advantages`.
      is_trained: Which usable groups [P] take part in the update: all, or those with signal with `train.refill`.
      counts: Counters of task, judge and sampler since the previous batch, summed over all processes, and the numbers
        of drawn prompts.
      position: Number of problems that this step and all previous steps have drawn, without groups that are discarded
        or in the queue.
      ahead: Number of prompts in the queue, in progress or complete. A run that is resumed after this step discards
        them, and draws their problems again.
    """

    graded: list[GradedGroup]
    left_out: list[GradedGroup]
    usable: list[GradedGroup]
    advantages: Float[np.ndarray, "P N"]
    is_trained: Bool[np.ndarray, " P"]
    counts: Metrics
    position: int
    ahead: int

    @property
    def trained(self) -> tuple[list[GradedGroup], Float[np.ndarray, "P N"]]:
        """The groups that take part in the update, and their advantages."""
        groups = [group for group, is_trained in zip(self.usable, self.is_trained, strict=True) if is_trained]
        return groups, self.advantages[self.is_trained]


@dataclasses.dataclass(frozen=True, eq=False)
class _Complete:
    """A complete group that no batch has taken yet.

    Attributes:
      graded: The group.
      usable: The group as it takes part in the update, or None if it is left out or a failure of the judge excludes it.
      advantages: Advantages [N], see `group_advantages`. 0 if the group is not usable.
    """

    graded: GradedGroup
    usable: GradedGroup | None
    advantages: Float[np.ndarray, " N"]


@dataclasses.dataclass
class Experience:
    """Produces one batch per training step, in step order.

    Attributes:
      rollouts: Generates the groups of a batch.
      task: Computes the rewards.
      judge: Clusters the generations of each group.
      problems: Order in which problems are drawn.
      advantages: Computes the advantages of graded groups.
      sampling: Function that maps a step to its sampling parameters.
      config: The configuration.
      timeline: Records when each batch is generated, graded and judged.
      stop: Interrupts waiting for the judge or for a batch when a shutdown is requested.
      num_lost: Number of prompts that an interrupted run had drawn ahead. The next batch counts them as discarded.
    """

    rollouts: Rollouts
    task: Task
    judge: Judge
    problems: ProblemOrder
    advantages: AdvantageFunction
    sampling: Callable[[int], Sampling]
    config: Config
    timeline: Timeline
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)
    num_lost: int = 0

    def __post_init__(self) -> None:
        self._train, self._judging = self.config.train, self.config.judge
        self._reads_judge = make_estimator(self.config.algo).reads_judge
        own = (self.rollouts, self.task, self.judge, self.sampling, self._train.num_generations, min_group(self.config))
        self._rounds = Rounds(*own, self.timeline, self.stop)
        self._complete: list[_Complete] = []

    async def wait_until_ready(self) -> None:
        """Waits until the judge's server responds, and warns if the largest request exceeds the judge's limits."""

        async def wait() -> None:
            if isinstance(self.judge, ServerBacked):
                await self.judge.wait_until_ready()
            if hosts.is_first():
                await warn_capacity(self.judge, self._judge_load())

        await hosts.barrier(self.stop.run_interruptible(wait()))

    async def batch(self, step: int, position: int) -> Batch:
        """Waits for the batch of `step` and returns it. The sampler then sleeps until weights are pushed, if it can.

        With `train.refill`, the update trains on the first `train.prompts_per_batch` groups with signal in data order,
        so responses that are generated quickly are not preferred. The sizes of rounds have no effect on this.

        Args:
          step: The step.
          position: Number of problems that the previous steps have drawn, `Batch.position` of the previous step.

        Raises:
          JudgeError: If the judge failed on more than `judge.max_failed_fraction` of the batch's prompts, and its
            failures affect the update.
          EpisodeError: If more than `rollouts.max_failed_fraction` of the batch's prompts, or all, are left out.
          Stopped: If a shutdown was requested.
        """
        counts, num_before = {}, len(self._complete)
        while count := self._num_missing(step):
            if len(self._complete) >= self._train.prompts_per_batch:
                self._check_failures([one.graded for one in self._complete])  # before failed prompts are refilled
            if not self._rounds.started:
                self._start_round(step, position, count, expected_in=step)
            received, graded, of_round = await self._rounds.receive(step)
            with self.timeline.clock(step).stage("advantages"):
                self._complete += await self._with_advantages(received.step, graded)
            counts = hosts.total([counts, of_round])
        num_lost, self.num_lost = self.num_lost, 0
        counts["data/drawn"] = float(len(self._complete) - num_before + num_lost)
        batch = self._take(step, position, counts)
        batch.counts["data/discarded"] = float(num_lost)
        if not self._train.staleness:
            batch.counts["data/discarded"] += len(self._complete)
            self._complete.clear()
        self._run_ahead(step, batch.position)
        await hosts.barrier(self.stop.run_interruptible(self.rollouts.sleep()))
        return dataclasses.replace(batch, ahead=len(self._queued()))

    async def close(self) -> None:
        """Cancels the rounds in progress."""
        await self._rounds.close()

    def _judge_load(self) -> JudgeLoad:
        """Returns the size of the largest judge request."""
        config, train, sampling = self.config, self._train, self.config.sampling
        num_generations = max(train.num_generations, config.eval.num_generations if config.eval.every else 0)
        return JudgeLoad(
            num_generations,
            train.max_prompt_tokens,
            sampling.max_tokens,
            sampling.max_turns if isinstance(self.task, Interactive) else 1,
        )

    def _num_missing(self, step: int) -> int:
        """Returns the number of prompts that a round of the step needs, or 0 if the queue has enough complete groups.

        A round after the first has the number of prompts that is expected to contain the missing groups with signal.
        """
        wanted, num_complete = self._train.prompts_per_batch, len(self._complete)
        found = sum(self._has_signal(one, step) for one in self._complete)
        expected = -(-max(0, wanted - found) * num_complete // max(1, found)) if num_complete else wanted
        return max(0, min(expected, wanted, max_draws(self._train) - num_complete))

    def _queued(self) -> list[Problem]:
        """Returns the problems of the queue, in data order."""
        in_progress = [problem for one in self._rounds.started for problem in one.problems]
        return [one.graded.group.problem for one in self._complete] + in_progress

    def _start_round(self, step: int, position: int, count: int, expected_in: int) -> None:
        """Starts a round after the prompts of the queue.

        Args:
          step: Step whose seeds the generations have.
          position: Number of problems that were drawn before those of the queue.
          count: Number of prompts of the round.
          expected_in: Step that is expected to train on the groups.
        """
        queued = self._queued()
        self._rounds.start(step, self.problems.draw(position + len(queued), count, queued), expected_in)

    def _run_ahead(self, step: int, position: int) -> None:
        """Starts rounds until the queue has the prompts of the next `train.staleness` batches.

        Args:
          step: Step whose batch is complete. All rounds have the seeds of the next step.
          position: Number of problems that were drawn before those of the queue.
        """
        for later in range(1, min(self._train.staleness, self._train.num_steps - step) + 1):
            count = later * self._train.prompts_per_batch - len(self._queued())
            if count > 0:
                self._start_round(step + 1, position, count, expected_in=step + later)

    def _check_failures(self, graded: Sequence[GradedGroup]) -> None:
        """Raises an error if too many groups of a batch are left out, or the judge failed on too many and is used."""
        check_failed_environments(graded, self.config.rollouts.max_failed_fraction)
        if self._reads_judge or self._judging.on_failure == "drop_always":
            check_failed_fraction(complete_groups(graded), self._judging.max_failed_fraction)

    async def _with_advantages(self, step: int, graded: Sequence[GradedGroup]) -> list[_Complete]:
        """Computes advantages on the first process, so that all processes agree.

        Args:
          step: Step whose seeds the groups have. The random keys of the estimator are also derived from it.
          graded: Groups of a round.
        """
        usable = {
            place: group
            for place, one in enumerate(graded)
            for group in usable_groups(complete_groups([one]), self._reads_judge, self._judging.on_failure)
        }
        advantages = np.zeros((len(graded), self._train.num_generations), np.float32)

        async def compute() -> Float[np.ndarray, "P N"]:
            return group_advantages(self.advantages, step, list(usable.values()), self._train.num_generations)

        if usable:
            advantages[list(usable)] = (await hosts.gather(compute()))[0]
        return [_Complete(one, usable.get(place), advantages[place]) for place, one in enumerate(graded)]

    def _has_signal(self, one: _Complete, step: int) -> bool:
        """Returns True if a group has an advantage other than 0, and is not too old for the update of a step."""
        return bool(has_signal(one.advantages[None])[0]) and not self._is_too_old(one, step)

    def _is_too_old(self, one: _Complete, step: int) -> bool:
        """Returns True if a group is older than the queue allows. Only a sampler with outdated weights generates it."""
        oldest = step - 1 - self._train.staleness
        versions = (generation.weight_versions for generation in one.graded.group.generations)
        return self._train.staleness > 0 and any(int(of_tokens.min()) < oldest for of_tokens in versions)

    def _take(self, step: int, position: int, counts: Metrics) -> Batch:
        """Removes the groups of a batch from the queue.

        Args:
          step: The step.
          position: Number of problems that were drawn before those of the queue.
          counts: Counters of the rounds that were received in this step.
        """
        end, wanted = min(len(self._complete), max_draws(self._train)), self._train.prompts_per_batch
        if self._train.refill:
            places = [place for place in range(end) if self._has_signal(self._complete[place], step)]
            end = places[wanted - 1] + 1 if len(places) >= wanted else end
        taken, self._complete = self._complete[:end], self._complete[end:]
        drawn = [one.graded for one in taken]
        self._check_failures(drawn)
        too_old = [one.graded for one in taken if self._is_too_old(one, step)]
        usable = {one.usable: one.advantages for one in taken if one.usable and not self._is_too_old(one, step)}
        advantages = np.array([*usable.values()], np.float32).reshape(-1, self._train.num_generations)
        with_signal = has_signal(advantages)
        numbers = {"data/with_signal": with_signal.sum(), "data/without_signal": (~with_signal).sum()}
        if self._train.staleness:
            numbers["data/too_old"] = len(too_old)
        if too_old:
            numbers["data/too_old_length"] = mean_length(too_old)
        left_out = left_out_groups(drawn)
        failures = Counter(failure.kind for failure in environment_failures(drawn))
        if isinstance(self.task, Interactive) or failures:
            numbers |= {"environment/failed_responses": failures.total(), "environment/failed_prompts": len(left_out)}
        numbers |= {f"environment/failed/{kind}": count for kind, count in failures.items()}
        counts |= {name: float(number) for name, number in numbers.items()}
        is_trained = with_signal if self._train.refill else np.ones(len(usable), bool)
        groups = complete_groups(drawn), left_out, list(usable)
        return Batch(*groups, advantages, is_trained, counts, position + end, ahead=0)
