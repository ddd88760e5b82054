"""Generated, graded and judged batches: made when they are needed or, at staleness 1, one ahead of training.

On several hosts each process makes the groups of its share of the prompts, and all receive the whole batch.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from grain import DatasetIterator

from poly_epo_jax.judges.llm import say_shortfalls
from poly_epo_jax.parallel import hosts
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.rollouts.grading import check_judge, grade_groups, judged
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.system.signals import Stop
from poly_epo_jax.types import Counting, GradedGroup, Judge, JudgeLoad, Metrics, Problem, Sampling, Served, Task


@dataclasses.dataclass(frozen=True)
class Batch:
    """A step's graded groups, the time that making them took on this host, and the data position after them."""

    graded: list[GradedGroup]
    timing: Metrics
    data_state: dict[str, Any]
    reads_judge: bool

    @property
    def usable(self) -> list[GradedGroup]:
        """The groups that take part in the update. If the judge is read, those that it failed on do not."""
        return judged(self.graded) if self.reads_judge else self.graded


@dataclasses.dataclass
class Experience:
    """One batch per step, in order.

    Args:
      batches: of problems.
      num_generations: N, per problem.
      sampling: step -> how it samples.
      last_step: no batch is made for a later step.
      staleness: 0: a batch is started when it is requested, with the newest weights. 1: the next batch is started as
        soon as one is handed out, with the weights of that moment, which are one step old when training uses it.
      reads_judge: whether the update reads the judge's output. If not, failures of the judge do not change the update.
      max_failed_share: the largest share of a batch's prompts on which a judge that is read may fail.
      judge_load: the most that the judge is shown at once; None: whether it fits is not checked.
      timeline: records when each batch is generated, graded and judged.
      stop: ends the waiting for the judge and for batches.
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
    max_failed_share: float
    timeline: Timeline
    judge_load: JudgeLoad | None = None
    stop: Stop = dataclasses.field(default_factory=Stop)
    _ahead: asyncio.Task[Batch] | None = None

    async def wait_until_ready(self) -> None:
        """Returns once the judge's server, if it has one, answers; reports what is too much for that judge."""
        if isinstance(self.judge, Served):
            await hosts.barrier(self.stop.interrupts(self.judge.wait_until_ready()))
        if self.judge_load and hosts.is_first():
            await say_shortfalls(self.judge, self.judge_load)

    async def batch(self, step: int) -> Batch:
        """Waits for the batch of `step`, and returns it.

        Raises:
          JudgeError: the judge has failed on too many prompts.
          Stopped: the run was asked to end.
        """
        own = asyncio.ensure_future(self.stop.interrupts(self._ahead or self._begin(step)))
        if hosts.count() > 1:
            await asyncio.wait([own])
            with self.timeline.clock(step).stage("exchange"):
                shares = await hosts.gather(own)
        else:
            shares = [await own]
        graded = [group for share in shares for group in share.graded]
        batch = dataclasses.replace(shares[hosts.index()], graded=graded)
        self._ahead = self._begin(step + 1) if self.staleness and step < self.last_step else None
        if self.reads_judge:
            check_judge(batch.graded, self.max_failed_share)
        return batch

    async def counts(self) -> Metrics:
        """What the task, judge and sampler have counted since the last call, on all hosts together."""

        async def own() -> Metrics:
            counts: Metrics = {}
            for part in (self.task, self.judge, self.rollouts.sampler):
                if isinstance(part, Counting):
                    counts |= part.metrics()
            return counts

        return hosts.total(await hosts.gather(own()))

    async def close(self) -> None:
        """Cancels a batch that was started but not requested."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)

    def _begin(self, step: int) -> asyncio.Task[Batch]:
        problems = hosts.share(next(self.batches))
        data_state = self.batches.get_state()

        async def make() -> Batch:
            groups = self.rollouts.generate(problems, self.num_generations, self.sampling(step))
            clock = self.timeline.clock(step)
            graded, timing = await grade_groups(groups, problems, self.task, self.judge, clock=clock)
            return Batch(graded, timing, data_state, self.reads_judge)

        return asyncio.create_task(make())
