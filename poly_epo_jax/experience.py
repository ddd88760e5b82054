"""Generates, grades and judges the batch of each training step.

With `staleness=0`, a batch is generated when training requests it. With `staleness=1`, the next batch is generated
while the current one is trained on. In a multi-process run, each process generates the groups of its share of the
prompts. The processes then exchange the groups, so that every process holds the full batch.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from grain import DatasetIterator

from poly_epo_jax.judges.capacity import warn_capacity
from poly_epo_jax.parallel import hosts
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.rollouts.grading import check_failed_fraction, grade_groups, usable_groups
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.returned_values import checked_counts
from poly_epo_jax.system.signals import StopSignal
from poly_epo_jax.types import GradedGroup, HasMetrics, Judge, JudgeLoad, Metrics, Problem, Sampling, ServerBacked, Task


@dataclasses.dataclass(frozen=True)
class Batch:
    """The graded groups of one training step.

    Attributes:
      graded: Graded groups of all prompts, in batch order.
      counts: Counters of task, judge and sampler since the previous batch, summed over all processes.
      timing: Seconds that each stage took on this process, and `judge/overlap_fraction`.
      data_state: State of the data iterator after this batch.
      reads_judge: Whether the method reads the judge's output.
      on_failure: Value of `judge.on_failure`.
    """

    graded: list[GradedGroup]
    counts: Metrics
    timing: Metrics
    data_state: dict[str, Any]
    reads_judge: bool
    on_failure: str

    @property
    def usable(self) -> list[GradedGroup]:
        """Groups that take part in the update, see `rollouts.grading.usable_groups`."""
        return usable_groups(self.graded, self.reads_judge, self.on_failure)


@dataclasses.dataclass
class Experience:
    """Produces one batch per training step, in step order.

    Attributes:
      rollouts: Generates the groups of a batch.
      task: Computes the rewards.
      judge: Clusters the generations of each group.
      batches: Iterator over batches of problems.
      num_generations: Number N of generations per problem.
      sampling: Function that maps a step to its sampling parameters.
      last_step: Last step of the run. Later batches are not prefetched.
      staleness: 0 starts a batch when it is requested, with the newest weights. 1 starts the next batch as soon as the
        current one is returned; its weights are then one step old when it is trained on.
      reads_judge: Whether the method reads the judge's output.
      max_failed_fraction: Maximum fraction of a batch's prompts on which the judge may fail, if its failures affect the
        update.
      timeline: Records when each batch is generated, graded and judged.
      judge_load: Size of the largest judge request. If None, it is not compared with the judge's limits.
      on_failure: Value of `judge.on_failure`, which selects the prompts that take part in the update.
      stop: Interrupts waiting for the judge or for a batch when a shutdown is requested.
    """

    rollouts: Rollouts
    task: Task
    judge: Judge
    batches: DatasetIterator[list[Problem]]
    num_generations: int
    sampling: Callable[[int], Sampling]
    last_step: int
    staleness: int
    reads_judge: bool
    max_failed_fraction: float
    timeline: Timeline
    judge_load: JudgeLoad | None = None
    on_failure: str = "drop"
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)
    _prefetched: asyncio.Task[Batch] | None = None

    async def wait_until_ready(self) -> None:
        """Waits until the judge's server responds, and warns if the largest request exceeds the judge's limits."""
        if isinstance(self.judge, ServerBacked):
            await hosts.barrier(self.stop.run_interruptible(self.judge.wait_until_ready()))
        if self.judge_load and hosts.is_first():
            await warn_capacity(self.judge, self.judge_load)

    async def batch(self, step: int) -> Batch:
        """Waits for the batch of `step` and returns it. The sampler then sleeps until weights are pushed, if it can.

        Raises:
          JudgeError: If the judge failed on more than `max_failed_fraction` of the prompts, and its failures affect the
            update.
          Stopped: If a shutdown was requested.
        """
        own = asyncio.ensure_future(self.stop.run_interruptible(self._prefetched or self._start_batch(step)))
        if hosts.count() > 1:
            await asyncio.wait([own])
            with self.timeline.clock(step).stage("exchange"):
                shares = await hosts.gather(own)
        else:
            shares = [await own]
        graded = [group for share in shares for group in share.graded]
        counts = hosts.total([share.counts for share in shares])
        batch = dataclasses.replace(shares[hosts.index()], graded=graded, counts=counts)
        self._prefetched = self._start_batch(step + 1) if self.staleness and step < self.last_step else None
        if self.reads_judge or self.on_failure == "drop_always":
            check_failed_fraction(batch.graded, self.max_failed_fraction)
        await hosts.barrier(self.stop.run_interruptible(self.rollouts.sleep()))
        return batch

    async def close(self) -> None:
        """Cancels the prefetched batch, if there is one."""
        if self._prefetched is not None:
            self._prefetched.cancel()
            await asyncio.gather(self._prefetched, return_exceptions=True)

    def _start_batch(self, step: int) -> asyncio.Task[Batch]:
        problems = hosts.share(next(self.batches))
        data_state = self.batches.get_state()

        async def make() -> Batch:
            groups = self.rollouts.generate(problems, self.num_generations, self.sampling(step))
            clock = self.timeline.clock(step)
            graded, timing = await grade_groups(groups, problems, self.task, self.judge, clock=clock)
            counts: Metrics = {}
            for part in (self.task, self.judge, self.rollouts.sampler):
                if isinstance(part, HasMetrics):
                    counts |= checked_counts(part, part.metrics(), counts)
            return Batch(graded, counts, timing, data_state, self.reads_judge, self.on_failure)

        return asyncio.create_task(make())
