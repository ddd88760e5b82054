"""Collects the requests of generations that wait for their next turn, and samples them in common calls."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt32

from poly_epo_jax.system.pending_calls import pending_call
from poly_epo_jax.system.repeated_warnings import warn_repeatedly
from poly_epo_jax.system.run_to_completion import cancel_all
from poly_epo_jax.types import Completion, ConcurrentCalls, Generation, Problem, Request, Sampler, Sampling

WINDOW_SECONDS = 0.02
"""Maximum time in seconds for which a request waits for others, if the sampler accepts concurrent calls."""
QUIET_SECONDS = 0.25
"""Time in seconds without a new request after which other samplers do not wait for slower episodes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """A request whose completions are awaited.

    Attributes:
      place: Position of the request among the requests of a call.
      request: The request.
      arrived: Completions, or the error that ended the call.
    """

    place: int
    request: Request
    arrived: asyncio.Queue[Completion | BaseException] = dataclasses.field(default_factory=asyncio.Queue)

    async def next(self) -> Completion:
        """Waits for the next completion, in the order in which they finish. There is one for each seed.

        Raises:
          RuntimeError: If the sampler does not return the completion.
        """
        arrived = await self.arrived.get()
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived


class TurnQueue:
    """Samples the turns of generations in common calls of a sampler.

    A call begins when all open generations wait. It also begins `WINDOW_SECONDS` after a request if the sampler accepts
    concurrent calls, and otherwise `QUIET_SECONDS` after the last request while no call is in progress, so that slow
    episodes do not delay others. A completion depends only on its request, so calls have no effect on tokens.

    Args:
      sampler: The sampler.
      sampling: Sampling parameters of all calls.
      num_open: Number of generations that request turns.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling, num_open: int):
        self.sampling, self._sampler, self._num_open = sampling, sampler, num_open
        self._num_generations, self._num_without_room = num_open, 0
        self._waiting: list[Pending] = []
        self._num_waiting = 0  # Number of generations that wait.
        self._calls: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_concurrent = isinstance(sampler, ConcurrentCalls)

    async def aclose(self) -> None:
        """Cancels the calls in progress, and waits until they have ended."""
        self._waiting.clear()
        self._stop_timer()
        await cancel_all(self._calls)

    def request(self, place: int, request: Request) -> Pending:
        """Adds a request to the next call.

        Args:
          place: Position among the requests of a call.
          request: The request, with one seed for each generation that waits.
        """
        pending = Pending(place, request)
        self._waiting.append(pending)
        self._num_waiting += len(request.seeds)
        self._begin_if_due()
        return pending

    def end(self, lacks_room: bool) -> None:
        """Counts a generation as complete.

        Args:
          lacks_room: Whether it ended because a reply left no tokens or turns for the policy.
        """
        self._num_open -= 1
        self._num_without_room += lacks_room
        self._begin_if_due()

    def warn_about_room(self) -> None:
        """Warns if a tenth of all generations ended because a reply left no tokens or turns for the policy."""
        if 10 * self._num_without_room >= max(1, self._num_generations):
            counts = f"{self._num_without_room} of {self._num_generations}"
            keys = f"sampling.max_tokens={self.sampling.max_tokens} or sampling.max_turns={self.sampling.max_turns}"
            warn_repeatedly(
                "room",
                f"{counts} episodes ended with reward 0 because a reply left no tokens or turns for the policy; "
                f"increase {keys}, or shorten the replies.",
            )

    def _begin_if_due(self) -> None:
        if self._waiting and self._num_waiting == self._num_open:
            self._begin()
        elif self._waiting and self._is_concurrent:
            self._timer = self._timer or asyncio.get_running_loop().call_later(WINDOW_SECONDS, self._begin)
        elif self._waiting and not self._calls:
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._begin)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._stop_timer()
        waiting, self._waiting, self._num_waiting = sorted(self._waiting, key=lambda one: one.place), [], 0
        call = asyncio.create_task(self._call(waiting))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda _: self._begin_if_due())

    async def _call(self, waiting: Sequence[Pending]) -> None:
        requests = [one.request for one in waiting]
        missing = {(place, index) for place, one in enumerate(requests) for index in range(len(one.seeds))}
        call = f"{type(self._sampler).__name__}.sample of problem {requests[0].problem_id!r}"
        call += f" and {len(requests) - 1} more" * (len(requests) > 1)
        try:
            with pending_call(call):
                async with contextlib.aclosing(self._sampler.sample(requests, self.sampling)) as completions:
                    async for completion in completions:
                        if (key := (completion.request, completion.index)) in missing:
                            missing.remove(key)
                            waiting[completion.request].arrived.put_nowait(completion)
            if missing:
                problem, count = Counter(requests[place].problem_id for place, _ in missing).most_common(1)[0]
                raise RuntimeError(f"{count} completions of problem {problem!r} are missing; check the sampler.")
        except BaseException as error:  # also if the call is cancelled, or the sampler raises CancelledError
            for one in waiting:
                one.arrived.put_nowait(error)
            if not isinstance(error, Exception):
                raise


@dataclasses.dataclass(frozen=True, eq=False)
class Turns:
    """The turns of the N generations of a prompt.

    Attributes:
      queue: Samples the turns.
      problem: The problem.
      prompt_ids: Token ids of the prompt.
      seeds: Seeds [N] of the first turns.
      place: Position of the first generation among all generations of the queue.
    """

    queue: TurnQueue
    problem: Problem
    prompt_ids: Int[np.ndarray, " L"]
    seeds: UInt32[np.ndarray, " N"]
    place: int

    def first(self) -> Pending:
        """Requests the first turns of all generations."""
        return self.queue.request(
            self.place, Request(self.problem.id, self.prompt_ids, self.seeds, self.queue.sampling.max_tokens)
        )

    async def next(self, index: int, before: Generation) -> Completion:
        """Samples the turn of a generation after `before`, with a separate seed and the remaining token limit."""
        ids = np.concatenate([self.prompt_ids, before.token_ids])
        seeds = self._derived_seed(index, len(before.turns))  # an even number
        request = Request(self.problem.id, ids, seeds, self.queue.sampling.max_tokens - len(before.token_ids))
        return await self.queue.request(self.place + index, request).next()

    def episode_seed(self, index: int) -> int:
        """Returns the seed of the episode of a generation."""
        return int(self._derived_seed(index, 1)[0])

    def _derived_seed(self, index: int, number: int) -> UInt32[np.ndarray, " 1"]:
        return np.random.SeedSequence([int(self.seeds[index]), number]).generate_state(1)
