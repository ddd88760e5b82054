"""Generates rounds of prompts in the background, and exchanges their graded groups between processes."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from poly_epo_jax.parallel import hosts
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.rollouts.grading import grade_groups
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.returned_values import checked_counts
from poly_epo_jax.system.run_to_completion import cancel_all
from poly_epo_jax.system.signals import StopSignal
from poly_epo_jax.types import GradedGroup, Judge, Metrics, Problem, Sampling, Task

_Share = tuple[list[GradedGroup], Metrics]
"""Groups in data order, and the counters of task, judge and sampler since the previous round."""


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """Prompts that are generated together.

    Attributes:
      step: Step whose seeds the generations have.
      problems: Problems of all processes, in data order.
      share: Generates, grades and judges the groups of this process.
    """

    step: int
    problems: Sequence[Problem]
    share: asyncio.Task[_Share]


@dataclasses.dataclass
class Rounds:
    """Rounds in progress. Several rounds may be in progress at once, and they are received in the order of their start.

    Every process starts the same rounds, and generates the groups of its share of their prompts.

    Attributes:
      rollouts: Generates the groups.
      task: Computes the rewards.
      judge: Clusters the generations of each group.
      sampling: Function that maps a step to its sampling parameters.
      num_generations: Number N of generations per prompt.
      min_group: Minimum number of generations on which neither environment nor reward failed. Groups with fewer are
        left out.
      timeline: Records when each round is generated, graded and judged.
      stop: Interrupts waiting for a round when a shutdown is requested.
      started: The rounds that have not been received, in the order of their start.
    """

    rollouts: Rollouts
    task: Task
    judge: Judge
    sampling: Callable[[int], Sampling]
    num_generations: int
    min_group: int
    timeline: Timeline
    stop: StopSignal
    started: list[Round] = dataclasses.field(default_factory=list)

    def start(self, step: int, problems: Sequence[Problem], expected_in: int) -> None:
        """Starts a round.

        Args:
          step: Step whose seeds the generations have.
          problems: Problems of all processes, in data order.
          expected_in: Step that is expected to train on the groups. The timeline shows the round as part of it.
        """
        share, clock = hosts.share(problems), self.timeline.clock(expected_in)

        async def make() -> _Share:
            groups = self.rollouts.generate(share, self.num_generations, self.sampling(step))
            limits = self.rollouts.grading_timeout_seconds, self.min_group
            graded = await grade_groups(groups, share, self.task, self.judge, None, clock, *limits)
            return graded, await checked_counts(
                self.task,
                self.judge,
                self.rollouts.sampler,
                self.rollouts,
                self.rollouts.environments,
                timeout_seconds=limits[0],
            )

        self.started.append(Round(step, problems, asyncio.create_task(make())))

    async def receive(self, step: int) -> tuple[Round, list[GradedGroup], Metrics]:
        """Waits for the first round.

        Args:
          step: Step that waits.

        Returns:
          The round, its groups and its counters, of all processes.

        Raises:
          Stopped: If a shutdown was requested.
        """
        first = self.started[0]
        own = asyncio.ensure_future(self.stop.run_interruptible(first.share))
        if hosts.count() > 1:
            await asyncio.wait([own])
            with self.timeline.clock(step).stage("exchange"):
                shares = await hosts.gather(own)
        else:
            shares = [await own]
        self.started.remove(first)
        return first, [group for groups, _ in shares for group in groups], hosts.total([counts for _, counts in shares])

    async def close(self) -> None:
        """Cancels the rounds in progress."""
        await cancel_all([one.share for one in self.started])
