"""Generated, graded and judged batches: made when they are needed or, at staleness 1, one ahead of training.

On several hosts each process makes its share of the prompts' groups, and has the whole batch in the end.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from grain import DatasetIterator

from poly_epo_jax.grading import grade_groups
from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.timeline import Timeline
from poly_epo_jax.types import GradedGroup, Judge, Metrics, Problem, Sampling, Task


@dataclasses.dataclass
class Batch:
    """A step's graded groups, what making them took on this host, and where the data stands after them."""

    graded: list[GradedGroup]
    timing: Metrics
    data_state: dict[str, Any]


class Experience:
    """One batch per step, in order.

    Args:
      sampling: of a step.
      last_step: no batch is made for a later one.
      staleness: 0: a batch is begun when it is asked for, on the newest weights. 1: the next one is begun as soon as
        one is handed out, on the weights of then, which training will have left by one step when it uses it.
      timeline: told when each batch is generated, graded and judged.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        task: Task,
        judge: Judge,
        batches: DatasetIterator[list[Problem]],
        num_generations: int,
        sampling: Callable[[int], Sampling],
        last_step: int,
        staleness: int,
        timeline: Timeline,
    ):
        self._rollouts, self._task, self._judge, self._batches = rollouts, task, judge, batches
        self._num_generations, self._sampling = num_generations, sampling
        self._last_step, self._staleness, self._timeline = last_step, staleness, timeline
        self._ahead: asyncio.Task[Batch] | None = None

    async def batch(self, step: int) -> Batch:
        """The batch of `step`, waited for."""
        own = self._ahead or self._begin(step)
        if hosts.count() > 1:
            await asyncio.wait([own])
            with self._timeline.clock(step).stage("exchange"):
                shares = await hosts.gather(own)
        else:
            shares = [await own]
        graded = [one for share in shares for one in share.graded]
        batch = dataclasses.replace(shares[hosts.index()], graded=graded)
        self._ahead = self._begin(step + 1) if self._staleness and step < self._last_step else None
        return batch

    async def close(self) -> None:
        """Drops what was begun and not asked for."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)

    def _begin(self, step: int) -> asyncio.Task[Batch]:
        problems = hosts.share(next(self._batches))
        data_state = self._batches.get_state()

        async def make() -> Batch:
            groups = self._rollouts.generate(problems, self._num_generations, self._sampling(step))
            clock = self._timeline.clock(step)
            graded, timing = await grade_groups(groups, problems, self._task, self._judge, clock=clock)
            return Batch(graded, timing, data_state)

        return asyncio.create_task(make())
