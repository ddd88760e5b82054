"""Tests environments that raise, hang, or return invalid values: counted, never rewarded, and closed once."""

import asyncio
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from episodes import MAX_TOKENS, PROBLEMS, ByHash, N, Sums, SumTask, graded, play
from fakes import PATIENCE, collect, unchecked

from poly_epo_jax.rollouts import environments, episode_places
from poly_epo_jax.rollouts.environments import MAX_ATTEMPTS
from poly_epo_jax.rollouts.episode_places import EpisodeLoop
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.system.pending_calls import pending_calls
from poly_epo_jax.types import EpisodeFailure, Generation, Outcome, Problem, Sampling


class Faulty(SumTask):
    """Calls `fault` in a method of the episodes of problem b, in the first `times` episodes of each seed."""

    def __init__(self, method: str, fault: Callable[[], Any], times: int = 100):
        super().__init__()
        self.method, self.fault, self.times = method, fault, times
        self.starts: dict[int, int] = {}

    def start(self, problem: Problem, seed: int) -> Any:
        self.starts[seed] = self.starts.get(seed, 0) + 1
        task, is_due = self, problem.id == "b" and self.starts[seed] <= self.times

        class Episode(Sums):
            async def reply(self, generation: Generation) -> str | None:
                if is_due and task.method == "reply":
                    return await fault(task)
                return await super().reply(generation)

            async def close(self) -> Outcome:
                outcome = await super().close()
                if is_due and task.method == "close":
                    return await fault(task)
                return outcome

        if is_due and self.method == "start":
            self.fault()
        self.episodes.append(Episode(self, seed))
        return self.episodes[-1]


async def fault(task: Faulty) -> Any:
    returned = task.fault()
    return await returned if asyncio.iscoroutine(returned) else returned


def raises(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


FAULTS = [
    (raises(EpisodeFailure("the game server has stopped")), "failed", "the game server has stopped"),
    (raises(KeyError("x")), "raised", f"KeyError at {__file__}:"),
    (raises(TimeoutError("of a client")), "raised", ": of a client"),
    (raises(SystemExit(1)), "raised", "SystemExit"),
    (raises(asyncio.CancelledError()), "raised", "CancelledError"),
]


@pytest.mark.parametrize("method", ["start", "reply", "close"])
@pytest.mark.parametrize(("fault", "kind", "reason"), FAULTS)
def test_failures_of_an_environment_are_counted_and_not_rewarded(method: str, fault: Any, kind: str, reason: str):
    task = Faulty(method, fault)
    a, b, c = play(task)
    assert b.generations == () and list(b.failures) == list(range(N))
    turn = " to turn 1" if method == "reply" else ""
    for failure in b.failures.values():
        assert failure.kind == kind
        assert f"Faulty: {method}{turn} of problem 'b'" in failure.reason and reason in failure.reason
        traceback = Path(failure.traceback_file).read_text() if failure.traceback_file else ""
        assert ("in fault" in traceback) == (kind == "raised")
    assert [y.token_ids.tolist() for y in (*a.generations, *c.generations)] == [
        y.token_ids.tolist() for one in play(SumTask()) if one.problem.id != "b" for y in one.generations
    ]
    assert sorted(task.starts.values()) == [1] * 2 * N + [MAX_ATTEMPTS] * N
    assert {episode.closed for episode in task.episodes} == {1}
    assert [len(one.rewards) for one in graded([a, b, c], task)] == [N, 0, N]


@pytest.fixture(autouse=True)
def long_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "CLEANUP_SECONDS", PATIENCE)


class Clock:
    """Replaces the clock of event loops, so that time passes only in the code of a test.

    Attributes:
      now: Time in seconds. A step of less than `BLOCKED_SECONDS` is counted for all calls that have not returned.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(episode_places, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("method", ["reply", "close"])
def test_an_environment_that_hangs_exceeds_its_deadline(clock: Clock, method: str):
    cancelled = queue.Queue[None]()

    async def answer_late() -> str:
        clock.now += 0.1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.put(None)
        return "?1"  # An answer after the deadline.

    task = Faulty(method, answer_late)
    a, b, c = play(task, timeout=0.05)
    assert {failure.kind for failure in b.failures.values()} == {"late"}
    assert "rollouts.episode_timeout_seconds=0.05" in b.failures[0].reason
    for _ in range(N * MAX_ATTEMPTS):  # Another thread cancels the calls.
        cancelled.get(timeout=PATIENCE)
    assert cancelled.empty()
    assert not a.failures and not c.failures


def test_calls_of_environments_are_pending_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("poly_epo_jax.system.pending_calls.MAX_SHOWN", 1000)
    seen = []
    play(Faulty("reply", lambda: seen.append(pending_calls()[0])))
    assert "Faulty: reply to turn 1 of problem 'b'" in seen[0] and not pending_calls()[0]


def test_an_environment_that_blocks_its_loop_is_named_and_others_are_repeated(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    released, blocks, warnings = threading.Event(), iter([True]), list[str]()
    monkeypatch.setattr(episode_places, "warn_repeatedly", lambda kind, text: warnings.append(text))

    class Blocking(SumTask):
        def start(self, problem: Problem, seed: int) -> Any:
            class Episode(Sums):
                async def reply(self, generation: Generation) -> str | None:
                    if next(blocks, False):
                        clock.now += 1000
                        released.wait(PATIENCE)
                    return await super().reply(generation)

            return Episode(self, seed)

    try:
        groups = play(Blocking())
    finally:
        released.set()
    for group, expected in zip(groups, play(SumTask()), strict=True):
        assert [y.token_ids.tolist() for y in group.generations] == [y.token_ids.tolist() for y in expected.generations]
    assert len(warnings) == 1 and "Blocking: reply to turn" in warnings[0]
    assert "rollouts.environment_workers" in warnings[0]


def test_time_during_which_another_call_blocks_the_loop_is_not_counted(clock: Clock):
    is_waiting, may_end = threading.Event(), asyncio.Event()

    class Waiting(Sums):
        async def reply(self, generation: Generation) -> str | None:
            is_waiting.set()
            await may_end.wait()
            return "waited"

        async def close(self) -> Outcome:
            clock.now += 50
            may_end.set()
            return Outcome(0.0)

    class WaitingTask(SumTask):
        def start(self, problem: Problem, seed: int) -> Any:
            return Waiting(self, seed)

    async def main() -> None:
        loop = EpisodeLoop(WaitingTask())
        for number in range(2):
            await loop.call("start", (number, "start", PROBLEMS[0], 0), 1.0)
        waiting = asyncio.create_task(loop.call("reply", (0, "reply", None), 1.0))
        await asyncio.to_thread(is_waiting.wait)
        assert (await loop.call("close", (1, "close"), PATIENCE)).kind == ""
        kind, value, _, seconds = await waiting
        assert (kind, value) == ("", "waited") and seconds <= 2 * episode_places.BEAT_SECONDS

    asyncio.run(main())


@pytest.mark.parametrize("method", ["start", "reply", "close"])
def test_a_repeated_episode_has_the_same_bytes(method: str):
    task = Faulty(method, raises(EpisodeFailure("once")), times=1)
    sampler = ByHash()
    rollouts = Rollouts(sampler, sampler.tokenizer, task, 8)
    groups = collect(rollouts, PROBLEMS, N, Sampling(MAX_TOKENS))
    for group, expected in zip(groups, play(SumTask()), strict=True):
        for y, other in zip(group.generations, expected.generations, strict=True):
            assert y.token_ids.tobytes() == other.token_ids.tobytes() and y.outcome == other.outcome
    assert rollouts.environments is not None
    assert rollouts.environments.metrics() == {"environment/retries": N, "environment/no_room": 0}
    assert rollouts.environments.metrics() == {"environment/retries": 0, "environment/no_room": 0}


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome(2.0), r"its reward is 2\.0"),
        (Outcome(float("nan")), "its reward is nan"),
        (unchecked(Outcome, reward="1", strategy=None, correct=None, metrics={}), "its reward is '1'"),
        (unchecked(Outcome, reward=1.0, strategy=[], correct=None, metrics={}), "its strategy"),
        (unchecked(Outcome, reward=1.0, strategy=None, correct=1, metrics={}), "its correct"),
        (Outcome(1.0, metrics={"x": float("inf")}), "its metric 'x'"),
        (1.0, "it is 1.0"),
    ],
)
def test_an_invalid_outcome_ends_the_run_with_one_sentence(outcome: Any, text: str):
    with pytest.raises(ValueError, match=rf"Episode\.close returned an invalid outcome for problem 'b': {text}"):
        play(Faulty("close", lambda: outcome))
