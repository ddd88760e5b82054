"""Tests environments that raise, hang, or return invalid values: counted, never rewarded, and closed once."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from episodes import MAX_TOKENS, PROBLEMS, ByHash, N, Sums, SumTask, graded, play
from fakes import PATIENCE, collect, unchecked
from simulated_time import SimulatedTime

from poly_epo_jax.rollouts import environments
from poly_epo_jax.rollouts.environments import MAX_ATTEMPTS
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
    assert [y.token_ids.tolist() for y in (*a.generations, *c.generations)] == [
        y.token_ids.tolist() for one in play(SumTask()) if one.problem.id != "b" for y in one.generations
    ]
    assert sorted(task.starts.values()) == [1] * 2 * N + [MAX_ATTEMPTS] * N
    assert {episode.closed for episode in task.episodes} == {1}
    assert [len(one.rewards) for one in graded([a, b, c], task)] == [N, 0, N]


@pytest.fixture(autouse=True)
def long_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "CLEANUP_SECONDS", PATIENCE)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    return SimulatedTime(monkeypatch, environments)


@pytest.mark.parametrize("method", ["reply", "close"])
def test_an_environment_that_hangs_exceeds_its_deadline(time: SimulatedTime, method: str):
    async def answer_late() -> str:
        time.expire()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "?1"  # An answer after the deadline.

    task = Faulty(method, answer_late)
    a, b, c = play(task, timeout=0.2)
    assert {failure.kind for failure in b.failures.values()} == {"late"}
    assert "rollouts.turn_timeout_seconds=0.2" in b.failures[0].reason
    assert time.expired == [0.2] * N * MAX_ATTEMPTS
    assert not a.failures and not c.failures


def test_calls_of_environments_are_pending_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("poly_epo_jax.system.pending_calls.MAX_SHOWN", 1000)
    seen = []
    play(Faulty("reply", lambda: seen.append(pending_calls()[0])))
    assert "Faulty: reply to turn 1 of problem 'b'" in seen[0] and not pending_calls()[0]


def test_an_environment_that_blocks_its_thread_does_not_block_the_trainer(time: SimulatedTime):
    trainer_continued = []

    def block() -> None:
        trainer_continued.append(time.expire().wait(PATIENCE))

    task = Faulty("reply", block, times=1)
    groups = play(task)
    assert trainer_continued == [True] * N
    assert sorted(task.starts.values()) == [1] * 2 * N + [2] * N
    assert not any(group.failures for group in groups)


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
    assert rollouts.environments.metrics() == {"environment/retries": N}
    assert rollouts.environments.metrics() == {"environment/retries": 0}


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
