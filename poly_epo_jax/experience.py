"""Generates, grades and judges the batch of each training step.

A batch is generated in rounds. The first round has as many prompts as a batch. With `train.refill`, further rounds
follow until enough prompts have an advantage other than 0.

With `train.staleness=0`, a batch is generated when training requests it. With `train.staleness=1`, the first round of
the next batch is generated while the current batch is trained on. In a multi-process run, each process generates the
groups of its share of the prompts of a round. The processes then exchange the groups, so that every process holds the
full batch.
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

from poly_epo_jax.config.keys import JudgeSection, TrainSection, max_draws
from poly_epo_jax.judges.capacity import warn_capacity
from poly_epo_jax.parallel import hosts
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.rollouts.grading import (
    check_failed_environments,
    check_failed_fraction,
    complete_groups,
    environment_failures,
    grade_groups,
    usable_groups,
)
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import ProblemOrder
from poly_epo_jax.rollouts.returned_values import checked_counts
from poly_epo_jax.step.advantages import AdvantageFunction, batch_features, has_signal
from poly_epo_jax.system.signals import StopSignal
from poly_epo_jax.types import (
    GradedGroup,
    HasMetrics,
    Interactive,
    Judge,
    JudgeLoad,
    Metrics,
    Sampling,
    ServerBacked,
    Task,
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The graded groups of one training step.

    Attributes:
      graded: Graded groups of the drawn prompts, in data order, without those whose environment failed. With
        `train.refill`, they end with the last group that is trained on. Later groups are discarded, and their problems
        are drawn again.
      usable: Groups that may take part in the update, see `rollouts.grading.usable_groups`.
      advantages: Advantages [P, N] of the P usable groups.
      is_trained: Which usable groups [P] take part in the update: all, or those with signal with `train.refill`.
      counts: Counters of task, judge and sampler since the previous batch, summed over all processes, and the numbers
        of drawn prompts.
      position: Number of problems that this step and all previous steps have drawn, without discarded groups.
    """

    graded: list[GradedGroup]
    usable: list[GradedGroup]
    advantages: Float[np.ndarray, "P N"]
    is_trained: Bool[np.ndarray, " P"]
    counts: Metrics
    position: int

    @property
    def trained(self) -> tuple[list[GradedGroup], Float[np.ndarray, "P N"]]:
        """The groups that take part in the update, and their advantages."""
        groups = [group for group, is_trained in zip(self.usable, self.is_trained, strict=True) if is_trained]
        return groups, self.advantages[self.is_trained]


_Round = tuple[list[GradedGroup], Metrics]
"""Graded groups of a round in data order, and the counters of task, judge and sampler since the previous round."""


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
      train: The `train` section of the configuration.
      judging: The `judge` section of the configuration.
      reads_judge: Whether the method reads the judge's output.
      timeline: Records when each batch is generated, graded and judged.
      max_failed_fraction: Maximum fraction of drawn prompts on which the environment may fail.
      judge_load: Size of the largest judge request. If None, it is not compared with the judge's limits.
      stop: Interrupts waiting for the judge or for a batch when a shutdown is requested.
    """

    rollouts: Rollouts
    task: Task
    judge: Judge
    problems: ProblemOrder
    advantages: AdvantageFunction
    sampling: Callable[[int], Sampling]
    train: TrainSection
    judging: JudgeSection
    reads_judge: bool
    timeline: Timeline
    max_failed_fraction: float = 0.25
    judge_load: JudgeLoad | None = None
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)
    _started: asyncio.Task[_Round] | None = None

    async def wait_until_ready(self) -> None:
        """Waits until the judge's server responds, and warns if the largest request exceeds the judge's limits."""
        if isinstance(self.judge, ServerBacked):
            await hosts.barrier(self.stop.run_interruptible(self.judge.wait_until_ready()))
        if self.judge_load and hosts.is_first():
            await warn_capacity(self.judge, self.judge_load)

    async def batch(self, step: int, position: int) -> Batch:
        """Waits for the batch of `step` and returns it. The sampler then sleeps until weights are pushed, if it can.

        With `train.refill`, the update trains on the first `train.prompts_per_batch` groups with signal in data order,
        so responses that are generated quickly are not preferred. The sizes of the rounds have no effect on this
        selection.

        Args:
          step: The step.
          position: Number of problems that the previous steps have drawn, `Batch.position` of the previous step.

        Raises:
          JudgeError: If the judge failed on more than `judge.max_failed_fraction` of the drawn prompts, and its
            failures affect the update.
          EpisodeError: If the environment failed on more than `max_failed_fraction` of the drawn prompts.
          Stopped: If a shutdown was requested.
        """
        graded, usable, counts, num_drawn = [], [], {}, 0
        advantages = np.zeros((0, self.train.num_generations), np.float32)
        while count := self._round_size(num_drawn, advantages):
            drawn, of_round = await self._exchange(step, position, num_drawn, count)
            graded, counts, num_drawn = graded + drawn, hosts.total([counts, of_round]), num_drawn + count
            check_failed_environments(graded, self.max_failed_fraction)
            if self.reads_judge or self.judging.on_failure == "drop_always":
                check_failed_fraction(complete_groups(graded), self.judging.max_failed_fraction)
            added = usable_groups(complete_groups(drawn), self.reads_judge, self.judging.on_failure)
            usable += added
            with self.timeline.clock(step).stage("advantages"):
                advantages = np.concatenate([advantages, await self._advantages(step, added)])
        batch = self._select(position, graded, usable, advantages, counts)
        if self.train.staleness and step < self.train.num_steps:
            self._started = self._start_round(step + 1, batch.position, 0, self.train.prompts_per_batch)
        await hosts.barrier(self.stop.run_interruptible(self.rollouts.sleep()))
        return batch

    async def close(self) -> None:
        """Cancels the round in progress, if there is one."""
        if self._started is not None:
            self._started.cancel()
            await asyncio.gather(self._started, return_exceptions=True)

    def _round_size(self, num_drawn: int, advantages: Float[np.ndarray, "P N"]) -> int:
        """Returns the number of prompts of the next round, or 0 if the batch is complete.

        A later round has the number of prompts that is expected to contain the missing groups with signal.

        Args:
          num_drawn: Number of prompts of the previous rounds.
          advantages: Advantages [P, N] of the P usable groups of the previous rounds.
        """
        wanted = self.train.prompts_per_batch
        found = int(has_signal(advantages).sum())
        expected = -(-max(0, wanted - found) * num_drawn // max(1, found)) if num_drawn else wanted
        return min(expected, wanted, max_draws(self.train) - num_drawn)

    def _start_round(self, step: int, position: int, num_drawn: int, count: int) -> asyncio.Task[_Round]:
        """Starts to generate this process's share of a round.

        Args:
          step: The step.
          position: Number of problems that the previous steps have drawn.
          num_drawn: Number of prompts of the previous rounds of the step.
          count: Number of prompts of this round.
        """
        problems = hosts.share(self.problems.draw(position, num_drawn + count)[num_drawn:])

        async def make() -> _Round:
            groups = self.rollouts.generate(problems, self.train.num_generations, self.sampling(step))
            graded = await grade_groups(groups, problems, self.task, self.judge, clock=self.timeline.clock(step))
            counts: Metrics = {}
            for part in (self.task, self.judge, self.rollouts.sampler, self.rollouts.environments):
                if isinstance(part, HasMetrics):
                    counts |= checked_counts(part, part.metrics(), counts)
            return graded, counts

        return asyncio.create_task(make())

    async def _exchange(self, step: int, position: int, num_drawn: int, count: int) -> _Round:
        """Waits for a round, which is started unless it is in progress, and returns the groups of all processes."""
        self._started = self._started or self._start_round(step, position, num_drawn, count)
        own = asyncio.ensure_future(self.stop.run_interruptible(self._started))
        if hosts.count() > 1:
            await asyncio.wait([own])
            with self.timeline.clock(step).stage("exchange"):
                shares = await hosts.gather(own)
        else:
            shares = [await own]
        self._started = None
        return [group for graded, _ in shares for group in graded], hosts.total([counts for _, counts in shares])

    async def _advantages(self, step: int, groups: list[GradedGroup]) -> Float[np.ndarray, "P N"]:
        """Returns the advantages [P, N] of P groups, as computed by the first process, so that all processes agree."""
        if not groups:
            return np.zeros((0, self.train.num_generations), np.float32)
        problems = [graded.group.problem for graded in groups]

        async def compute() -> Float[np.ndarray, "P N"]:
            return self.advantages(step, problems, batch_features(groups))

        return (await hosts.gather(compute()))[0]

    def _select(
        self,
        position: int,
        graded: list[GradedGroup],
        usable: list[GradedGroup],
        advantages: Float[np.ndarray, "P N"],
        counts: Metrics,
    ) -> Batch:
        """Selects the groups that are trained on, and discards the groups after the last of them.

        Args:
          position: Number of problems that the previous steps have drawn.
          graded: Groups of all rounds.
          usable: Usable groups of all rounds.
          advantages: Advantages [P, N] of these P groups.
          counts: Counters of all rounds.
        """
        num_drawn, is_trained = len(graded), np.ones(len(usable), bool)
        if self.train.refill:
            with_signal = np.flatnonzero(has_signal(advantages))[: self.train.prompts_per_batch]
            is_trained = np.isin(np.arange(len(usable)), with_signal)
            if len(with_signal) == self.train.prompts_per_batch:
                end = int(with_signal[-1]) + 1
                usable, advantages, is_trained = usable[:end], advantages[:end], is_trained[:end]
                groups = [one.group for one in graded]
                graded = graded[: groups.index(usable[-1].group) + 1]
        found = int(has_signal(advantages).sum())
        failures = Counter(failure.kind for failure in environment_failures(graded))
        if isinstance(self.task, Interactive):
            counts = counts | {"environment/failed_prompts": float(failures.total())}
        counts = counts | {f"environment/failed/{kind}": float(count) for kind, count in failures.items()}
        counts = counts | {
            "data/drawn": float(num_drawn),
            "data/with_signal": float(found),
            "data/without_signal": float(len(usable) - found),
            "data/discarded": float(num_drawn - len(graded)),
        }
        complete = complete_groups(graded)
        return Batch(complete, usable, advantages, is_trained, counts, position + len(graded))
