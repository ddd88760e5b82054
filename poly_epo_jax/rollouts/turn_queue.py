"""Collects the requests of generations that wait for their next turn, and samples them in common calls."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from jaxtyping import Int, UInt32

from poly_epo_jax.types import Completion, ConcurrentCalls, Generation, Problem, Request, Sampler, Sampling

WINDOW_SECONDS = 0.02
"""Maximum time for which a request waits for others, if the sampler accepts concurrent calls."""


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A request with one seed, and the completion that its generation awaits. `place` orders the requests of a call."""

    place: int
    request: Request
    completion: asyncio.Future[Completion]


class TurnQueue:
    """Samples the turns of generations in common calls of a sampler.

    A call begins when all open generations wait, so that the calls do not depend on the time that environments take.
    If the sampler accepts concurrent calls, a call also begins `WINDOW_SECONDS` after a request, so that no generation
    waits for the turns of others. A completion depends only on its request, so calls have no effect on tokens.

    Args:
      sampler: The sampler.
      sampling: Sampling parameters of all calls.
      num_open: Number of generations that request turns.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling, num_open: int):
        self.sampling, self._sampler, self._num_open = sampling, sampler, num_open
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_concurrent = isinstance(sampler, ConcurrentCalls)

    async def __aenter__(self) -> "TurnQueue":
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Cancels the calls in progress, and waits until they have ended."""
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def complete(self, place: int, request: Request) -> Completion:
        """Returns the completion of a request with one seed.

        Args:
          place: Position among the requests of a call.
          request: The request. Requests with the same `prompt_ids` array are sampled as one request.

        Raises:
          RuntimeError: If the sampler does not return the completion.
        """
        waiting = _Waiting(place, request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._begin_if_due()
        return await waiting.completion

    def end(self) -> None:
        """Counts a generation as complete."""
        self._num_open -= 1
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self._waiting and len(self._waiting) == self._num_open:
            self._begin()
        elif self._waiting and self._timer is None and self._is_concurrent:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_SECONDS, self._begin)

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = sorted(self._waiting, key=lambda one: one.place), []
        call = asyncio.create_task(self._call(waiting))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, waiting: Sequence[_Waiting]) -> None:
        groups: dict[int, list[_Waiting]] = {}
        for one in waiting:
            groups.setdefault(id(one.request.prompt_ids), []).append(one)
        merged = [
            dataclasses.replace(ones[0].request, seeds=np.concatenate([one.request.seeds for one in ones]))
            for ones in groups.values()
        ]
        places = list(groups.values())
        try:
            async with contextlib.aclosing(self._sampler.sample(merged, self.sampling)) as completions:
                async for completion in completions:
                    awaited = places[completion.request][completion.index].completion
                    if not awaited.done():  # cancelled
                        awaited.set_result(completion)
            missing = Counter(one.request.problem_id for one in waiting if not one.completion.done())
            if missing:
                problem, count = missing.most_common(1)[0]
                raise RuntimeError(f"{count} completions of problem {problem} are missing; check the sampler.")
        except Exception as error:
            for one in waiting:
                if not one.completion.done():
                    one.completion.set_exception(error)
        finally:
            for one in waiting:  # the call was cancelled, or the sampler raised CancelledError
                one.completion.cancel()


@dataclasses.dataclass(frozen=True, eq=False)
class Turns:
    """The turns of one generation.

    Attributes:
      queue: Samples the turns.
      prompt_ids: Token ids of the prompt. Generations of a prompt have the same array.
      seed: Seed of the first turn.
      place: Position of the generation among all generations of the queue.
      problem: The problem.
    """

    queue: TurnQueue
    prompt_ids: Int[np.ndarray, " L"]
    seed: np.uint32
    place: int
    problem: Problem

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters."""
        return self.queue.sampling

    @property
    def episode_seed(self) -> int:
        """Seed of the episode."""
        return int(self._derived_seed(1)[0])

    async def next(self, before: Generation | None) -> Completion:
        """Samples the turn after `before`, or the first turn, with a separate seed and the remaining token limit."""
        ids, seeds, limit = self.prompt_ids, np.array([self.seed]), self.sampling.max_tokens
        if before is not None:
            ids, limit = np.concatenate([ids, before.token_ids]), limit - len(before.token_ids)
            seeds = self._derived_seed(len(before.turns))  # an even number
        return await self.queue.complete(self.place, Request(self.problem.id, ids, seeds, limit))

    def end(self) -> None:
        """Marks the generation as complete."""
        self.queue.end()

    def _derived_seed(self, number: int) -> UInt32[np.ndarray, " 1"]:
        return np.random.SeedSequence([int(self.seed), number]).generate_state(1)
