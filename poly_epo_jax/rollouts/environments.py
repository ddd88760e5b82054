"""Runs the episodes of a task with time limits, in an event loop of a separate thread or in worker processes."""

import asyncio
import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from poly_epo_jax.rollouts.episode_places import INTERRUPTED, EpisodeLoop, EpisodeWorker, pickled_task
from poly_epo_jax.rollouts.grading import MAX_ABANDONED, EpisodeError
from poly_epo_jax.rollouts.returned_values import checked_outcome, checked_reply
from poly_epo_jax.system.daemon_thread import num_abandoned_threads
from poly_epo_jax.system.evaluates import EVALUATES
from poly_epo_jax.system.pending_calls import pending_call
from poly_epo_jax.system.run_to_completion import run_to_completion
from poly_epo_jax.types import EnvironmentFailure, Generation, Interactive, Metrics, Outcome, Problem

CLEANUP_SECONDS = 2.0
"""Maximum time in seconds to wait until an episode is closed that failed or was interrupted."""

MAX_ATTEMPTS = 3
"""Maximum number of times that an episode is played until its environment does not fail."""


class FailedEpisode(Exception):
    """Raised with the arguments of an `EnvironmentFailure` when an environment fails."""


@dataclasses.dataclass
class Environments:
    """Starts the episodes of a task.

    Attributes:
      task: The task.
      timeout_seconds: Maximum time in seconds of all calls of an episode, without waiting for other episodes.
      num_workers: Number of worker processes, each of which runs one call at a time. If 0, all calls run in the event
        loop of a daemon thread, so that an environment that blocks its loop cannot block the trainer or its shutdown.
      memory_gb: Memory limit of each worker, in GiB. It is only enforced on Linux.
    """

    task: Interactive
    timeout_seconds: float
    num_workers: int = 0
    memory_gb: float = 4.0

    def __post_init__(self):
        self._places: list[EpisodeLoop | EpisodeWorker] = []
        self._pickled = pickled_task(self.task) if self.num_workers else ({}, b"")
        self.numbers = itertools.count()  # of episodes
        self._counts = {is_evaluation: Counter[str]() for is_evaluation in (False, True)}
        self._spares: list[EpisodeWorker] = []
        self._close = weakref.finalize(self, _stop_all, self._places, self._spares)

    def metrics(self) -> Metrics:
        """Returns the numbers of repeated episodes and of episodes that lacked room since the last call."""
        counts, self._counts[EVALUATES.get()] = self._counts[EVALUATES.get()], Counter()
        return {f"environment/{name}": float(counts[name]) for name in ("retries", "no_room")}

    def count(self, name: str, number: int) -> None:
        """Adds a number of events to a metric of the training step or evaluation that the caller belongs to."""
        self._counts[EVALUATES.get()][name] += number

    async def play(
        self,
        problem: Problem,
        seed: int,
        first: Generation,
        take_turn: Callable[[Generation, str], Awaitable[Generation]],
    ) -> Generation | EnvironmentFailure:
        """Plays an episode after the policy's first turn. An episode that fails is repeated with the same seed.

        An episode that another one interrupted, by blocking its loop or ending its worker, has not failed.

        Args:
          problem: The problem.
          seed: Seed of the episode.
          first: The first turn.
          take_turn: Function that appends a reply and the next turn of the policy to a generation. If they do not fit,
            the result has the finish reason "length". Raises FailedEpisode if the reply is longer than the environment
            has declared.

        Returns:
          The generation with its outcome, or the failure if all `MAX_ATTEMPTS` attempts have failed.
        """
        failure, num_failures = None, 0
        while num_failures < MAX_ATTEMPTS:
            self.count("retries", failure is not None)
            # An episode that has ended its worker would interrupt the other episodes of the next one, too.
            episode = RunningEpisode(self, problem, isolate=failure is not None and failure.kind in ("late", "lost"))
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
                num_failures += failure.kind != INTERRUPTED
                continue
            finally:
                await episode.discard()
            if generation.finish_reason == "length":  # otherwise, the policy could gain by not ending an episode
                outcome = dataclasses.replace(outcome, reward=0.0, correct=False)
            return dataclasses.replace(generation, outcome=outcome)
        assert failure is not None
        return failure

    def place(self, isolate: bool = False) -> EpisodeLoop | EpisodeWorker:
        """Returns the place with the fewest episodes. Places that have failed are replaced.

        Args:
          isolate: Whether to return a worker for one episode, unless `num_workers` episodes have one.

        Raises:
          EpisodeError: If `MAX_ABANDONED` calls have not returned, because threads cannot be stopped.
        """
        if (count := num_abandoned_threads()) >= MAX_ABANDONED:
            raise EpisodeError(
                f"{count} calls of environments or rewards have not returned, and cannot be stopped; set "
                "rollouts.environment_workers."
            )
        alive = [place for place in self._places if place.is_alive]
        shared = [place for place in alive if place.is_shared]
        is_alone = isolate and len(alive) - len(shared) < self.num_workers
        if len(shared) == max(1, self.num_workers) and not is_alone:
            return min(shared, key=lambda place: place.num_episodes)
        is_replacement = is_alone or len(alive) < len(self._places)
        new = self._new_worker(is_replacement) if self.num_workers else EpisodeLoop(self.task)
        new.is_shared = not is_alone
        self._places[:] = [*alive, new]
        return new

    def _new_worker(self, is_replacement: bool) -> EpisodeWorker:
        """Returns a worker. After a replacement, a spare worker starts, so that the next one does not take time."""
        start = partial(EpisodeWorker, self._pickled, int(self.memory_gb * 2**30))
        new = self._spares.pop() if self._spares else start()
        if is_replacement:
            self._spares.append(start())
        return new


def _stop_all(*places: Iterable[EpisodeLoop | EpisodeWorker]) -> None:
    for place in itertools.chain(*places):
        if isinstance(place, EpisodeWorker):
            place.stop()


class RunningEpisode:
    """An episode whose returned values are checked, and which is closed exactly once.

    Args:
      environments: Starts the episode.
      problem: Problem of the episode.
      isolate: Whether it should run in a separate worker, see `Environments.place`.
    """

    def __init__(self, environments: Environments, problem: Problem, isolate: bool = False):
        self._environments, self._problem, self._number = environments, problem, next(environments.numbers)
        self._place, self._class_name, self._seconds, self._is_closed = environments.place(isolate), "", 0.0, False
        self._place.num_episodes += 1

    async def start(self, seed: int) -> None:
        """Starts the episode with a seed."""
        self._class_name = await self._call("start", self._problem, seed)

    async def reply(self, generation: Generation) -> str | None:
        """Returns the reply to the last turn of a generation."""
        return checked_reply(
            self._class_name,
            self._problem,
            await self._call("reply", generation, name=f"reply to turn {len(generation.turns) // 2 + 1}"),
        )

    async def close(self) -> Outcome:
        """Closes the episode, and returns its outcome."""
        self._is_closed = True
        return checked_outcome(self._class_name, self._problem, await self._call("close"))

    async def discard(self) -> None:
        """Closes the episode if it is not closed yet, without an outcome."""
        self._place.num_episodes -= 1
        if not self._is_closed and self._place.is_alive:
            self._is_closed = True
            # The call follows an interrupted `start` that may still be running.
            closing = asyncio.create_task(self._place.call("close", (self._number, "close"), CLEANUP_SECONDS))
            # Generation waits for this also if it is cancelled while episodes are being closed.
            await run_to_completion(asyncio.wait([closing], timeout=CLEANUP_SECONDS))
            closing.cancel()
        if isinstance(self._place, EpisodeWorker) and not self._place.is_shared:
            self._place.stop()

    async def _call(self, method: str, *arguments: Any, name: str = "") -> Any:
        """Calls a method of the episode within its remaining time.

        Raises:
          FailedEpisode: If the method raises an exception, or the episode exceeds its time limit or is lost.
        """
        limit, task = self._environments.timeout_seconds, self._environments.task
        name = f"{type(task).__name__}: {name or method} of problem {self._problem.id!r}"
        message = (self._number, method, *arguments)
        with pending_call(name):
            kind, value, traceback_file, seconds = await self._place.call(
                name, message, max(0.0, limit - self._seconds)
            )
        self._seconds += seconds
        if not kind:
            return value
        if kind == "late":
            value = f"did not return before the calls of its episode took rollouts.episode_timeout_seconds={limit:g}"
        raise FailedEpisode(kind, f"{name} {value}", traceback_file)
