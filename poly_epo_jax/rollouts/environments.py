"""Runs the episodes of a task with time limits, in an event loop that is separate from the loop of the trainer."""

import asyncio
import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from poly_epo_jax.rollouts.returned_values import checked_outcome, checked_reply
from poly_epo_jax.system.evaluates import EVALUATES
from poly_epo_jax.system.pending_calls import pending_call
from poly_epo_jax.system.run_to_completion import run_to_completion
from poly_epo_jax.system.user_code import user_line
from poly_epo_jax.types import (
    EnvironmentFailure,
    EpisodeFailure,
    Generation,
    Interactive,
    Metrics,
    Outcome,
    Problem,
)

CLEANUP_SECONDS = 5.0
"""Maximum time in seconds to wait until an episode is closed that failed or was interrupted."""

MAX_ATTEMPTS = 3
"""Maximum number of times that an episode is played until its environment does not fail."""


class FailedEpisode(Exception):
    """Raised with kind and reason when a method of an environment raises an exception or exceeds its time limit."""


@dataclasses.dataclass
class Environments:
    """Starts the episodes of a task.

    All methods of episodes run in the event loop of a daemon thread, so that an environment that blocks its loop cannot
    block the trainer or its shutdown.

    Attributes:
      task: The task.
      timeout_seconds: Maximum time in seconds of each call of `start`, `reply` and `close`.
    """

    task: Interactive
    timeout_seconds: float
    _loop: asyncio.AbstractEventLoop | None = None
    _retries: Counter[bool] = dataclasses.field(default_factory=Counter)  # by `EVALUATES`

    def metrics(self) -> Metrics:
        """Returns the number of repeated episodes since the last call."""
        return {"environment/retries": float(self._retries.pop(EVALUATES.get(), 0))}

    async def play(
        self,
        problem: Problem,
        seed: int,
        first: Generation,
        take_turn: Callable[[Generation, str], Awaitable[Generation]],
    ) -> Generation | EnvironmentFailure:
        """Plays an episode after the policy's first turn. An episode that fails is repeated with the same seed.

        Args:
          problem: The problem.
          seed: Seed of the episode.
          first: The first turn.
          take_turn: Function that appends a reply and the next turn of the policy to a generation. If they do not fit,
            the result has the finish reason "length".

        Returns:
          The generation with its outcome, or the failure if all `MAX_ATTEMPTS` attempts have failed.
        """
        failure = None
        for attempt in range(MAX_ATTEMPTS):
            self._retries[EVALUATES.get()] += attempt > 0
            episode = RunningEpisode(self, problem)
            try:
                await episode.start(seed)
                generation = first
                while generation.finish_reason == "stop":
                    reply = await episode.reply(generation)
                    if reply is None:
                        break
                    generation = await take_turn(generation, reply)
                outcome = await episode.close()
            except FailedEpisode as error:
                failure = EnvironmentFailure(*error.args)
                continue
            finally:
                await episode.discard()
            if generation.finish_reason == "length":  # otherwise, the policy could gain by not ending an episode
                outcome = dataclasses.replace(outcome, reward=0.0, correct=False)
            return dataclasses.replace(generation, outcome=outcome)
        assert failure is not None
        return failure

    async def call(self, problem: Problem, method: str, function: Callable[[], Awaitable[Any]]) -> Any:
        """Awaits a call of a method in the event loop of the environments.

        Args:
          problem: Problem of the episode.
          method: Name of the method, for messages.
          function: Calls the method.

        Raises:
          FailedEpisode: If the method raises an exception or exceeds the time limit.
        """
        name = f"{type(self.task).__name__}: {method}"
        limit = asyncio.timeout(self.timeout_seconds)
        try:
            async with limit:
                with pending_call(f"{name} of problem {problem.id!r}"):
                    return await asyncio.wrap_future(self.submit(function))
        except EpisodeFailure as error:
            raise FailedEpisode("failed", f"{name} of problem {problem.id!r} failed: {error}") from error
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise FailedEpisode("raised", f"{name} of problem {problem.id!r} raised CancelledError") from None
        except Exception as error:
            if limit.expired():
                late = f"did not return within rollouts.turn_timeout_seconds={self.timeout_seconds:g}"
                raise FailedEpisode("late", f"{name} of problem {problem.id!r} {late}") from None
            raised = f"raised {type(error).__name__}{user_line(error)}: {error}"
            raise FailedEpisode("raised", f"{name} of problem {problem.id!r} {raised}") from error

    def submit(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Starts a call in the event loop of the environments, and returns its `concurrent.futures.Future`."""

        async def call() -> Any:
            try:
                return await function()
            except (SystemExit, KeyboardInterrupt, StopIteration) as error:  # would end the loop, or be lost
                raise RuntimeError(f"{type(error).__name__}: {error}") from None

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(call(), self._loop)


class RunningEpisode:
    """An episode whose returned values are checked, and which is closed exactly once.

    Args:
      environments: Starts the episode.
      problem: Problem of the episode.
    """

    def __init__(self, environments: Environments, problem: Problem):
        self._environments, self._problem = environments, problem
        self._episode: Any = None  # an object of a user's class
        self._is_closed = False

    async def start(self, seed: int) -> None:
        """Starts the episode with a seed."""

        async def begin() -> None:
            self._episode = self._environments.task.start(self._problem, seed)

        await self._environments.call(self._problem, "start", begin)

    async def reply(self, generation: Generation) -> str | None:
        """Returns the reply to the last turn of a generation."""
        method = f"reply to turn {len(generation.turns) // 2 + 1}"
        reply = await self._environments.call(self._problem, method, lambda: self._episode.reply(generation))
        return checked_reply(self._episode, self._problem, reply)

    async def close(self) -> Outcome:
        """Closes the episode, and returns its outcome."""
        self._is_closed = True
        outcome = await self._environments.call(self._problem, "close", self._episode.close)
        return checked_outcome(self._episode, self._problem, outcome)

    async def discard(self) -> None:
        """Closes the episode if it is not closed yet, without an outcome."""
        if self._is_closed:
            return
        self._is_closed = True

        async def end() -> None:
            # An interrupted `start` may still be running when the episode is discarded. This call follows it.
            with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt):
                if self._episode is not None:
                    await self._episode.close()

        ended = asyncio.wrap_future(self._environments.submit(end))
        # Generation waits for this also if it is cancelled while episodes are being closed.
        await run_to_completion(asyncio.wait([ended], timeout=CLEANUP_SECONDS))
