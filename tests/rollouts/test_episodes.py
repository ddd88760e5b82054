"""Tests episodes with state: exact tokens, separate states, limits, failures of environments, and interruptions."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import ByLetter, Scripted, collect, until

from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.rollouts.environments import MAX_ATTEMPTS
from poly_epo_jax.rollouts.grading import grade_groups
from poly_epo_jax.rollouts.groups import Rollouts, generation_seeds
from poly_epo_jax.types import (
    Completion,
    EpisodeFailure,
    Generation,
    Group,
    Interactive,
    Outcome,
    Problem,
    Request,
    Rewarded,
    Sampling,
)

ALPHABET = "abcdxyz?:0123456789"
PROBLEMS = [Problem(name, f"{name}:", "") for name in "abc"]
N, MAX_TOKENS = 8, 40


class ByHash(Scripted):
    """Writes a letter that depends on the seed and the prompt, with log-probabilities that depend on both."""

    def __init__(self):
        super().__init__(lambda request, index: "", ALPHABET)

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        for place, request in enumerate(requests):
            for index, seed in enumerate(request.seeds.tolist()):
                ids, logprobs = spoken(request.prompt_ids, seed)
                yield Completion(place, index, ids, logprobs, "stop", self.version)


class Concurrent(ByHash):
    """Accepts concurrent calls."""

    accepts_concurrent_calls = True


def spoken(prompt_ids: Sequence[int] | np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a letter with the stop token, and their log-probabilities."""
    rng = np.random.default_rng([seed, len(prompt_ids), int(np.sum(prompt_ids))])
    return np.array([rng.integers(2, 6), 1], np.int32), -rng.exponential(size=2).astype(np.float32)


class Sums:
    """Replies with the running sum of all letters and the seed, until the sum is divisible by 4 or exceeds 40."""

    def __init__(self, task: "SumTask", seed: int):
        self.task, self.total, self.turns, self.closed = task, seed % 10, [], 0

    async def reply(self, generation: Generation) -> str | None:
        await self.task.pause()
        self.turns.append(generation.turns[-1])
        assert generation.turns[::2] == tuple(self.turns), "turns of another episode"
        self.total += ALPHABET.index(generation.turns[-1]) + 1
        await self.task.pause()
        return None if self.total % 4 == 0 or self.total > 40 else f"?{self.total}"

    async def close(self) -> Outcome:
        self.closed += 1
        await self.task.pause()
        return Outcome(float(self.total % 4 == 0), self.turns[0] if self.turns else None, metrics={"sum": self.total})


class SumTask:
    """Starts episodes of `Sums`, whose methods take random times up to `delay` seconds."""

    train_problems = held_out_problems = PROBLEMS

    def __init__(self, delay: float = 0.0):
        self.delay, self.episodes, self._rng = delay, [], np.random.default_rng()

    async def pause(self) -> None:
        if self.delay:
            await asyncio.sleep(self._rng.uniform(0, self.delay))

    def start(self, problem: Problem, seed: int) -> Any:
        self.episodes.append(Sums(self, seed))
        return self.episodes[-1]


def play(task: Any, sampler: Scripted | None = None, **settings: Any) -> list[Group]:
    sampler = sampler or ByHash()
    rollouts = Rollouts(sampler, sampler.tokenizer, task, 8, turn_timeout_seconds=settings.pop("timeout", 60.0))
    return collect(rollouts, PROBLEMS, N, Sampling(**{"max_tokens": MAX_TOKENS} | settings))


def replayed(problem: Problem, seed: int) -> tuple[list[int], list[float], list[bool], float]:
    """Returns tokens, log-probabilities, mask and sum of an episode, without the code of the package."""
    encode = lambda text: [ALPHABET.index(letter) + 2 for letter in text]  # noqa: E731
    total = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]) % 10
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    for turn in range(100):
        turn_seed = int(np.random.SeedSequence([seed, 2 * turn]).generate_state(1)[0]) if turn else seed
        letter, values = spoken(np.array(encode(problem.prompt) + ids), turn_seed)
        ids, logprobs, mask = [*ids, *letter.tolist()], [*logprobs, *values.tolist()], [*mask, True, True]
        total += int(letter[0]) - 1
        if total % 4 == 0 or total > 40:
            return ids, logprobs, mask, total
        reply = encode(f"?{total}")
        ids, logprobs, mask = ids + reply, logprobs + [0.0] * len(reply), mask + [False] * len(reply)
    raise AssertionError


@pytest.mark.parametrize("sampler", [ByHash, Concurrent])
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_episodes_equal_an_independent_replay(sampler: type[Scripted], delay: float):
    """Tokens do not depend on the time that replies take, or on the requests that are sampled together."""
    task = SumTask(delay)
    groups = play(task, sampler(), max_tokens=500)
    turns = []
    for group in groups:
        assert group.failure is None and len(group.generations) == N
        for y, seed in zip(group.generations, generation_seeds(0, group.problem, N).tolist(), strict=True):
            ids, logprobs, mask, total = replayed(group.problem, seed)
            assert y.token_ids.tolist() == ids and y.loss_mask.tolist() == mask
            np.testing.assert_array_equal(y.logprobs, np.array(logprobs, np.float32))
            assert y.outcome == Outcome(float(total % 4 == 0), y.turns[0], metrics={"sum": total})
            assert y.finish_reason == "stop" and y.text == "".join(y.turns)
            turns.append(len(y.turns))
    assert min(turns) == 1 and max(turns) >= 5 and max(turns) % 2
    assert [episode.closed for episode in task.episodes] == [1] * len(PROBLEMS) * N


def test_generations_do_not_wait_for_turns_of_other_problems():
    """With concurrent calls, the episodes of a problem end while the sampler holds the first turn of another."""

    async def main() -> list[str]:
        is_read, seen = asyncio.Event(), []

        class Held(Concurrent):
            async def sample(self, requests: Sequence[Request], sampling: Sampling):
                async for completion in super().sample(requests, sampling):
                    if requests[completion.request].problem_id == "c":
                        await is_read.wait()
                    yield completion

        sampler = Held()
        rollouts = Rollouts(sampler, sampler.tokenizer, SumTask(), 8)
        async for group in rollouts.generate(PROBLEMS, N, Sampling(500)):
            seen.append(group.problem.id)
            if len(seen) == 2:
                is_read.set()
        return seen

    assert asyncio.run(main())[2] == "c"


def graded(groups: Sequence[Group], task: Any) -> list[Any]:
    async def stream():
        for group in groups:
            yield group

    return asyncio.run(grade_groups(stream(), PROBLEMS, task, ExactJudge(task)))


def test_rewards_and_strategies_are_those_of_the_outcomes():
    task = SumTask()
    assert isinstance(task, Interactive) and not isinstance(task, Rewarded)
    for one in graded(play(task, max_tokens=500), task):
        first = [y.turns[0] for y in one.group.generations]
        assert [ids == one.clustering.ids[0] for ids in one.clustering.ids] == [letter == first[0] for letter in first]
        assert one.rewards.tolist() == [y.outcome.reward for y in one.group.generations]
        np.testing.assert_array_equal(one.correct, one.rewards == 1)


class Sure(SumTask):
    """A task whose episodes have the best possible outcome, also if they do not end."""

    def start(self, problem: Problem, seed: int) -> Any:
        class Episode(Sums):
            async def close(self) -> Outcome:
                return Outcome(1.0, "s", True, {"sum": 1.0})

        return Episode(self, seed)


@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"max_tokens": 9}])
def test_unfinished_episodes_have_reward_0_and_are_trained_on(limit: dict[str, int]):
    task = Sure()
    groups = play(task, **{"max_tokens": 500} | limit)
    complete = play(task, max_tokens=500)
    reasons = set()
    for one, whole in zip(graded(groups, task), complete, strict=True):
        for y, reward, correct, longer in zip(
            one.group.generations, one.rewards, one.correct, whole.generations, strict=True
        ):
            reasons.add(y.finish_reason)
            assert longer.token_ids[: len(y.token_ids)].tolist() == y.token_ids.tolist()
            assert (reward, correct) == ((1, True) if y.finish_reason == "stop" else (0, False))
            assert (y.finish_reason == "stop") == (len(y.turns) == len(longer.turns))
            assert len(y.turns) % 2 and y.outcome is not None and y.outcome.strategy == "s"
            assert len(y.turns) <= 3 and len(y.token_ids) <= 9
    assert reasons == {"stop", "length"}


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


async def answer_late() -> str:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "?1"  # An answer after the deadline.
    return ""


FAULTS = [
    (raises(EpisodeFailure("the game server is gone")), "failed", "the game server is gone"),
    (raises(KeyError("x")), "raised", "KeyError: 'x'"),
    (raises(TimeoutError("of a client")), "raised", "TimeoutError: of a client"),
    (raises(SystemExit(1)), "raised", "SystemExit"),
    (raises(asyncio.CancelledError()), "raised", "CancelledError"),
]


@pytest.mark.parametrize("method", ["start", "reply", "close"])
@pytest.mark.parametrize(("fault", "kind", "reason"), FAULTS)
def test_failures_of_an_environment_are_counted_and_not_rewarded(method: str, fault: Any, kind: str, reason: str):
    task = Faulty(method, fault)
    a, b, c = play(task)
    assert b.generations == () and b.failure is not None and b.failure.kind == kind
    assert f"Faulty: {method} of problem b" in b.failure.reason and reason in b.failure.reason
    assert [y.token_ids.tolist() for y in (*a.generations, *c.generations)] == [
        y.token_ids.tolist() for one in play(SumTask()) if one.problem.id != "b" for y in one.generations
    ]
    assert sorted(task.starts.values()) == [1] * 2 * N + [MAX_ATTEMPTS] * N
    assert {episode.closed for episode in task.episodes} == {1}
    assert [len(one.rewards) for one in graded([a, b, c], task)] == [N, 0, N]


@pytest.mark.parametrize(("method", "hang"), [("reply", answer_late), ("close", answer_late)])
def test_an_environment_that_hangs_exceeds_its_deadline(method: str, hang: Any):
    task = Faulty(method, hang)
    _, b, _ = play(task, timeout=0.2)
    assert b.failure is not None and b.failure.kind == "late"
    assert "rollouts.turn_timeout_seconds=0.2" in b.failure.reason


def test_an_environment_that_blocks_its_thread_does_not_block_the_trainer():
    task = Faulty("reply", lambda: time.sleep(0.15), times=1)
    start = time.monotonic()
    groups = play(task, timeout=0.05)
    assert time.monotonic() - start < 10
    assert any(group.failure is not None and group.failure.kind == "late" for group in groups)


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
        (Outcome("1"), "its reward is '1'"),  # pyright: ignore[reportArgumentType]
        (Outcome(1.0, []), "its strategy"),  # pyright: ignore[reportArgumentType]
        (Outcome(1.0, correct=1), "its correct"),  # pyright: ignore[reportArgumentType]
        (Outcome(1.0, metrics={"x": float("inf")}), "its metric 'x'"),
        (1.0, "it is 1.0"),
    ],
)
def test_an_invalid_outcome_ends_the_run_with_one_sentence(outcome: Any, text: str):
    with pytest.raises(ValueError, match=rf"Episode\.close returned an invalid outcome for problem b: {text}"):
        play(Faulty("close", lambda: outcome))


@pytest.mark.parametrize("how", ["closed", "cancelled", "sampler fails"])
def test_all_episodes_are_closed_once_when_generation_ends_early(how: str):
    async def main() -> SumTask:
        class Waiting(SumTask):
            async def pause(self) -> None:
                if self.delay:
                    await asyncio.sleep(60)

        class Failing(ByHash):
            async def sample(self, requests: Sequence[Request], sampling: Sampling):
                if how == "sampler fails" and len(requests[0].seeds) == 1:
                    raise OSError("out of memory")
                async for completion in super().sample(requests, sampling):
                    yield completion

        task, sampler = Waiting(), Failing()
        task.delay = float(how == "cancelled")
        groups = Rollouts(sampler, sampler.tokenizer, task, 8).generate(PROBLEMS, N, Sampling(500))

        async def read() -> None:
            async for _ in groups:
                break
            await groups.aclose()

        reading = asyncio.create_task(read())
        if how == "cancelled":
            await until(lambda: len(task.episodes) == 3 * N)
            task.delay = 0.0
            reading.cancel()
        results = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(results[0], {"cancelled": asyncio.CancelledError, "sampler fails": OSError}.get(how, object))
        return task

    task = asyncio.run(main())
    assert len(task.episodes) == 3 * N and {episode.closed for episode in task.episodes} == {1}


def test_single_turn_tasks_start_no_episodes():
    groups = play(ByLetter())
    assert all(y.outcome is None and len(y.turns) == 1 for group in groups for y in group.generations)
