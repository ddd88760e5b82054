"""Tests `train.staleness`: the queue of groups that are generated ahead of the update."""

import asyncio
import contextvars
import dataclasses
import random
import signal
from collections.abc import AsyncGenerator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import LETTERS, PATIENCE, LetterJudge, RandomLetters
from tiny_training import tiny_config, tiny_experience, train_tiny
from training_runs import rows_of

from poly_epo_jax.experience import Batch, Experience
from poly_epo_jax.parallel import hosts
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.step.advantages import Features
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.system.signals import Stopped, StopSignal
from poly_epo_jax.types import (
    Clustering,
    Completion,
    Group,
    Judge,
    JudgeFailure,
    JudgeLoad,
    Params,
    Problem,
    Request,
    Sampling,
)

TWENTY = [Problem(str(i), f"{i}:", "a") for i in range(20)]
REFILL: dict[str, Any] = {"algo.advantages": "grpo", "train.refill": True}


class Delayed(RandomLetters):
    """Completes groups in a random order, and long after other rounds have started, as servers do in flight.

    Args:
      seed: Seed of the delays.
      fails_after: Number of steps after which requests fail. If None, they never fail.
    """

    def __init__(self, seed: int = 0, fails_after: int | None = None):
        super().__init__()
        self.random, self.fails_after = random.Random(seed), fails_after
        self.keys: list[tuple[int, str, int]] = []

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        version = self.version
        if self.fails_after is not None and version >= self.fails_after:
            raise ServerError("The server failed.")
        self.keys += [(sampling.seed, one.problem_id, int(one.seeds[0])) for one in requests]
        places = [(place, index) for place, one in enumerate(requests) for index in range(len(one.seeds))]
        self.random.shuffle(places)
        for place, index in places:
            for _ in range(self.random.choice((0, 0, 0, 1, 20))):
                await asyncio.sleep(0)
            completion = self.completion(place, index, self.text(requests[place], index))
            yield dataclasses.replace(completion, weight_versions=np.full(len(completion.token_ids), version))

    def text(self, request: Request, index: int) -> str:
        return LETTERS[request.seeds[index] % 4]


class Fickle(LetterJudge):
    """Fails on a quarter of the groups."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        letters = [y.text for y in group.generations]
        return JudgeFailure("broken", "no") if letters[0] == letters[1] else await super().cluster(group)


class SlowToReport(LetterJudge):
    """Never reports its limits. Requests a shutdown as soon as they are requested."""

    def __init__(self):
        super().__init__()
        self.stop = StopSignal()

    async def capacity_warnings(self, load: JudgeLoad) -> list[str]:
        self.stop.request(signal.SIGTERM)
        await asyncio.Event().wait()
        return []


def test_a_shutdown_does_not_wait_for_the_limits_of_the_judge():
    judge = SlowToReport()
    experience = tiny_experience(tiny_config(), judge=judge)
    experience.stop = judge.stop

    async def main() -> None:
        with judge.stop.on_signals():
            await asyncio.wait_for(experience.wait_until_ready(), PATIENCE)

    with pytest.raises(Stopped):
        asyncio.run(main())


async def draw_batches(experience: Experience, num_steps: int, pauses: int = 0) -> list[Batch]:
    """Returns the batches of all steps, between which the event loop runs for a random time."""
    lengths, found = random.Random(pauses), list[Batch]()
    for step in range(1, num_steps + 1):
        found.append(await experience.batch(step, found[-1].position if found else 0))
        for _ in range(lengths.choice((0, 3, 100))):
            await asyncio.sleep(0)
        await experience.rollouts.push_weights({}, step)
    await experience.close()
    return found


def queue_experience(
    staleness: int, num_steps: int, sampler: RandomLetters | None = None, judge: Judge | None = None, **changes: Any
) -> Experience:
    settings = {"train.prompts_per_batch": 5, "train.num_steps": num_steps, "train.staleness": staleness} | changes
    return tiny_experience(
        tiny_config(**settings), sampler or Delayed(), judge=judge, advantages=centered_rewards, problems=TWENTY
    )


def centered_rewards(step: int, problems: Sequence[Problem], features: Features) -> np.ndarray:
    """Returns advantages without compiling an estimator."""
    rewards = np.asarray(features["rewards"])
    return rewards - rewards.mean(axis=1, keepdims=True)


def queue_batches(
    staleness: int, num_steps: int, sampler: RandomLetters | None = None, judge: Judge | None = None, **changes: Any
) -> list[Batch]:
    experience = queue_experience(staleness, num_steps, sampler, judge, **changes)
    return asyncio.run(draw_batches(experience, num_steps))


def ages(batch: Batch, step: int) -> list[int]:
    return [step - 1 - int(y.weight_versions.min()) for graded in batch.usable for y in graded.group.generations]


def key(group: Group) -> tuple[str, int, tuple[str, ...]]:
    return group.problem.id, group.problem.occurrence, tuple(y.text for y in group.generations)


@pytest.mark.parametrize("changes", [{}, REFILL, REFILL | {"train.max_draws": 6}], ids=["plain", "refill", "few draws"])
@pytest.mark.parametrize("staleness", [1, 2, 3, 7])
def test_no_group_is_too_old_or_lost_or_trained_on_twice(staleness: int, changes: dict[str, Any]):
    num_steps, sampler = 16, Delayed(staleness)
    found = queue_batches(staleness, num_steps, sampler, Fickle(), **changes)
    order, position = tiny_experience(tiny_config(), problems=TWENTY).problems, 0
    for step, batch in enumerate(found, start=1):
        # All problems are used in data order, each once, and those of a batch differ in `occurrence`.
        assert [one.group.problem for one in batch.graded] == order.draw(position, len(batch.graded))
        names = [(one.group.problem.id, one.group.problem.occurrence) for one in batch.graded]
        assert len(set(names)) == len(names) >= 5
        position += len(batch.graded)
        assert batch.position == position and batch.ahead >= 5 * min(staleness, num_steps - step)
        assert batch.counts["data/discarded"] == batch.counts["data/too_old"] == 0
        assert max(ages(batch, step)) <= staleness
    assert max(max(ages(batch, step)) for step, batch in enumerate(found, start=1)) == staleness
    # Each group has its own seeds, also of problems that are drawn repeatedly. No drawn group is lost.
    assert len(set(sampler.keys)) == len(sampler.keys) == position + found[-1].ahead
    assert sum(batch.counts["data/drawn"] for batch in found) == position + found[-1].ahead


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("changes", [{}, REFILL], ids=["plain", "refill"])
def test_delays_have_no_effect_on_batches(staleness: int, changes: dict[str, Any]):
    expected, *others = (
        [
            ([key(one.group) for one in batch.graded], batch.advantages.tolist(), batch.is_trained.tolist())
            for batch in queue_batches(staleness, 12, sampler, **changes)
        ]
        for sampler in (RandomLetters(), Delayed(1), Delayed(2))
    )
    assert others == [expected] * 2


def test_generation_is_at_most_k_batches_ahead():
    """Without refill, exactly k, except at the beginning and at the end."""
    assert [batch.ahead for batch in queue_batches(3, 6)] == [15, 15, 15, 10, 5, 0]
    found = queue_batches(3, 6)
    assert [max(ages(batch, step)) for step, batch in enumerate(found, start=1)] == [0, 1, 2, 3, 3, 3]
    assert [batch.counts["data/drawn"] for batch in found] == [5.0] * 6


class Thirds(Delayed):
    """Responds "b" to two thirds of the problems, and otherwise with half of the responses "a"."""

    def text(self, request: Request, index: int) -> str:
        return "b" if int(request.problem_id) % 3 or index % 2 else "a"


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_refilled_batches_train_on_the_same_problems_at_any_staleness(staleness: int):
    """A group after the last trained group stays in the queue: it is neither discarded nor drawn again."""
    refill: dict[str, Any] = REFILL | {"train.max_draws": 60, "train.num_generations": 2}
    found = queue_batches(staleness, 24, Thirds(), **refill)
    order, position = tiny_experience(tiny_config(), problems=TWENTY).problems, 0
    for step, batch in enumerate(found, start=1):
        problems = order.draw(position, 60)
        with_signal = [place for place, problem in enumerate(problems) if int(problem.id) % 3 == 0][:5]
        assert [one.group.problem for one in batch.trained[0]] == [problems[place] for place in with_signal]
        assert batch.position == position + with_signal[-1] + 1
        assert batch.counts["data/without_signal"] == batch.position - position - 5
        position = batch.position
        assert max(ages(batch, step)) <= staleness
    assert position == 343
    drawn, discarded = (sum(batch.counts[f"data/{name}"] for batch in found) for name in ("drawn", "discarded"))
    assert drawn == position + discarded + found[-1].ahead
    assert (discarded, found[-1].ahead) == {0: (41, 0), 1: (0, 2), 3: (0, 2)}[staleness]


class Outdated(Delayed):
    """A server that ignores weight updates for six steps."""

    async def push_weights(self, params: Params, version: int) -> None:
        if version % 6 == 0:
            await super().push_weights(params, version)


class Continued(Delayed):
    """A server that began the responses to every third problem three steps before, and continued them in flight."""

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        async for completion in super().sample(requests, sampling):
            versions = completion.weight_versions.copy()
            if int(requests[completion.request].problem_id) % 3 == 0:
                versions[0] = max(0, versions[0] - 3)
            yield dataclasses.replace(completion, weight_versions=versions)


@pytest.mark.parametrize("sampler", [Outdated, Continued])
@pytest.mark.parametrize("changes", [{}, REFILL], ids=["plain", "refill"])
def test_outdated_groups_are_counted_but_not_trained_on(sampler: type[Delayed], changes: dict[str, Any]):
    found = queue_batches(2, 24, sampler(), **changes)
    for step, batch in enumerate(found, start=1):
        too_old = [one for one in batch.graded if step - 1 - one.group.generations[0].weight_versions.min() > 2]
        assert batch.counts["data/too_old"] == len(too_old) == len(batch.graded) - len(batch.usable)
        assert not {one.group for one in too_old} & {one.group for one in batch.usable}
        assert ("data/too_old_length" in batch.counts) == bool(too_old)
        assert max(ages(batch, step), default=0) <= 2
    assert sum(batch.counts["data/too_old"] for batch in found) > 20


class Processes:
    """Two processes in one event loop, whose results are exchanged as by `hosts.gather`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.index = contextvars.ContextVar[int]("index")
        self.exchanges: list[list[asyncio.Future[Any]]] = []
        self.num_calls = [0, 0]
        parts = {"count": lambda: 2, "index": self.index.get, "gather": self.gather, "barrier": self.barrier}
        for name, function in parts.items():
            monkeypatch.setattr(hosts, name, function)

    async def gather(self, work: Awaitable[Any]) -> list[Any]:
        index, loop = self.index.get(), asyncio.get_running_loop()
        call, self.num_calls[index] = self.num_calls[index], self.num_calls[index] + 1
        if call == len(self.exchanges):
            self.exchanges.append([loop.create_future() for _ in range(2)])
        self.exchanges[call][index].set_result(await work)
        return await asyncio.gather(*self.exchanges[call])

    async def barrier(self, work: Awaitable[Any]) -> Any:
        return (await self.gather(work))[self.index.get()]

    async def run(self, *experiences: Experience) -> list[list[Batch]]:
        async def one(index: int, experience: Experience) -> list[Batch]:
            self.index.set(index)
            return await draw_batches(experience, experience.config.train.num_steps, pauses=index)

        return await asyncio.gather(*(one(*item) for item in enumerate(experiences)))


@pytest.mark.parametrize("changes", [{}, REFILL], ids=["plain", "refill"])
def test_processes_agree(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]):
    """The groups of two processes complete in different orders and at different times."""
    single = queue_batches(3, 10, **changes)
    experiences = [queue_experience(3, 10, Delayed(seed), **changes) for seed in (1, 2)]
    for found in asyncio.run(Processes(monkeypatch).run(*experiences)):
        for batch, expected in zip(found, single, strict=True):
            assert [key(one.group) for one in batch.graded] == [key(one.group) for one in expected.graded]
            assert (batch.position, batch.ahead, batch.counts) == (expected.position, expected.ahead, expected.counts)
            np.testing.assert_array_equal(batch.advantages, expected.advantages)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, REFILL], ids=["plain", "refill"])
def test_a_resumed_run_discards_and_counts_the_queue(tmp_path: Path, changes: dict[str, Any]):
    settings = changes | {"train.staleness": 3, "train.num_steps": 9, "eval.every": 0, "algo.importance_cap": 2.0}
    with pytest.raises(ServerError):
        train_tiny(tmp_path, (), Delayed(fails_after=3), changes=settings)
    trained = len(rows_of(tmp_path))
    assert 3 <= trained < 9
    train_tiny(tmp_path, (), Delayed(), changes=settings)
    rows, generations = rows_of(tmp_path), read_rows(tmp_path / "generations.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row["data/discarded"] for row in rows] == [9.0 if step == trained + 1 else 0.0 for step in range(1, 10)]
    assert max(row["response/max_staleness"] for row in rows) <= 3 and rows[trained]["response/max_staleness"] == 0
    used = len(generations) / 8
    assert sum(row["data/drawn"] for row in rows) >= used + 9
    if not changes:
        assert sum(row["data/drawn"] for row in rows) == used + 9 == 9 * 3 + 9
