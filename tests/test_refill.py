"""Tests `train.refill`: the selected groups, the numbers of drawn prompts, and resumed runs."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import LetterJudge, RandomLetters
from tiny_training import tiny_config, tiny_experience, train_tiny
from training_runs import rows_of

from poly_epo_jax.config import default
from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.experience import Batch, Experience
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.rollouts.grading import JudgeError
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Clustering, Completion, Group, Problem, Request, Sampling

GRPO: dict[str, Any] = {"algo.advantages": "grpo", "train.refill": True, "eval.every": 0}
TWENTY = [Problem(str(i), f"{i}:", "a") for i in range(20)]


def is_hard(problem: str, seed: int) -> bool:
    """Returns True in 3 of 4 cases. All responses to the problem are then incorrect in the step with this seed."""
    return hashlib.sha256(f"{problem} {seed}".encode()).digest()[0] >= 64


class Hard(RandomLetters):
    """Responds "b" to hard problems, and otherwise with half of the responses "a"."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        self.sizes.append(len(requests))
        for place in reversed(range(len(requests))):  # the completion order must have no effect
            hard = is_hard(requests[place].problem_id, sampling.seed)
            for index in range(len(requests[place].seeds)):
                yield self.completion(place, index, "b" if hard or index % 2 else "a")


def batches(experience: Experience, count: int) -> list[Batch]:
    async def draw() -> list[Batch]:
        found: list[Batch] = []
        for step in range(1, count + 1):
            found.append(await experience.batch(step, found[-1].position if found else 0))
        await experience.close()
        return found

    return asyncio.run(draw())


def hard_batches(count: int, sampler: RandomLetters | None = None, **changes: Any) -> list[Batch]:
    few = {"train.prompts_per_batch": 5, "train.num_generations": 2}
    settings = GRPO | few | {"train.max_draws": 50, "train.num_steps": count} | changes
    return batches(tiny_experience(tiny_config(**settings), sampler or Hard(), problems=TWENTY), count)


@pytest.mark.slow
def test_the_batch_is_the_first_groups_with_signal_in_data_order():
    """The numbers of drawn prompts are exact, and have the expectation of the known rate of prompts without signal."""
    order, position, drawn = tiny_experience(tiny_config(), problems=TWENTY).problems, 0, []
    for step, batch in enumerate(hard_batches(60), start=1):
        problems = order.draw(position, 50)
        with_signal = [i for i, problem in enumerate(problems) if not is_hard(problem.id, step)][:5]
        end = with_signal[-1] + 1 if len(with_signal) == 5 else 50
        trained, advantages = batch.trained
        assert [one.group.problem for one in trained] == [problems[i] for i in with_signal]
        assert [one.group.problem for one in batch.graded] == problems[:end]
        assert (np.abs(advantages).max(axis=1) > 1e-6).all()
        counts = {key.removeprefix("data/"): batch.counts[key] for key in batch.counts if key.startswith("data/")}
        assert counts["with_signal"] == len(with_signal) and counts["without_signal"] == end - len(with_signal)
        assert counts["drawn"] == end + counts["discarded"] <= 50
        assert batch.position == position + end
        position = batch.position
        drawn.append(end)
    assert np.mean(drawn) == pytest.approx(5 / 0.25, rel=0.2)


@pytest.mark.slow
def test_the_sizes_of_the_rounds_have_no_effect(monkeypatch: pytest.MonkeyPatch):
    sampler = Hard()
    expected = hard_batches(20, sampler)
    assert max(sampler.sizes) == 5 and len(sampler.sizes) > 40
    monkeypatch.setattr(Experience, "_num_missing", lambda self, step: 0 if self._complete else 50)
    for one, other in zip(expected, hard_batches(20), strict=True):
        assert one.position == other.position and other.counts["data/drawn"] == 50
        pairs = zip(one.graded, other.graded, strict=True)
        assert all(same(first.group.generations) == same(second.group.generations) for first, second in pairs)
        np.testing.assert_array_equal(one.trained[1], other.trained[1])


def same(generations: Sequence[Any]) -> list[str]:
    return [generation.text for generation in generations]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_repeated_problem_has_other_responses(staleness: int):
    """A step draws more prompts than there are problems."""

    class Long(RandomLetters):
        def completion(self, place: int, index: int, text: str) -> Completion:
            return super().completion(place, index, "b" + text)

    class Same(LetterJudge):
        async def cluster(self, group: Group) -> Clustering:
            return Clustering(np.zeros(len(group.generations), np.int32))

    changes = {"train.max_draws": 60, "train.staleness": staleness, "train.num_generations": 16}
    settings = GRPO | {"train.prompts_per_batch": 5, "train.num_steps": 2} | changes
    found = batches(tiny_experience(tiny_config(**settings), Long(), judge=Same(), problems=TWENTY), 2)
    for batch in found:
        assert batch.counts["data/drawn"] == 60 and not batch.trained[0]
        texts = [tuple(same(graded.group.generations)) for graded in batch.graded]
        assert len(set(texts)) == len(texts) == 60


@pytest.mark.slow
def test_a_step_draws_at_most_the_maximum_number_of_prompts():
    settings: dict[str, Any] = {"train.max_draws": 7}
    for batch in hard_batches(10, **settings):
        assert 5 <= batch.counts["data/drawn"] <= 7
        assert len(batch.trained[0]) == batch.counts["data/with_signal"] <= 5
    assert any(batch.counts["data/with_signal"] < 5 for batch in hard_batches(10, **settings))


class SomeFail(LetterJudge):
    async def cluster(self, group: Any) -> Any:
        self.failing = [problem.id for problem in TWENTY[::3]]
        return await super().cluster(group)


def test_prompts_on_which_the_judge_failed_are_drawn_again_and_counted_apart():
    changes = GRPO | {"algo.advantages": "marginal_set", "train.prompts_per_batch": 5, "train.num_steps": 4}
    for batch in batches(tiny_experience(tiny_config(**changes), judge=SomeFail(), problems=TWENTY), 4):
        assert len(batch.trained[0]) == 5 and len(batch.usable) < len(batch.graded)
        counts, failed = batch.counts, len(batch.graded) - len(batch.usable)
        parts = counts["data/with_signal"] + counts["data/without_signal"] + counts["data/discarded"]
        assert counts["data/drawn"] == parts + failed
    strict = changes | {"judge.max_failed_fraction": 0.0}
    with pytest.raises(JudgeError, match=r"failed on \d of 5 prompts"):
        batches(tiny_experience(tiny_config(**strict), judge=SomeFail(), problems=TWENTY), 4)


class Dying(RandomLetters):
    """Has no correct response to one problem. Optionally fails in the first refill after the second step."""

    def __init__(self, fails: bool):
        super().__init__()
        self.fails, self.last_seed = fails, -1

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        is_refill, self.last_seed = sampling.seed == self.last_seed, sampling.seed
        if self.fails and is_refill and sampling.seed > 2:
            raise ServerError("The server failed.")
        async for one in super().sample(requests, sampling):
            is_hard = requests[one.request].problem_id == "q"
            yield self.completion(one.request, one.index, "d") if is_hard else one


@pytest.mark.slow
def test_a_run_that_fails_in_a_refill_writes_the_same_bytes_after_a_resume(tmp_path: Path):
    changes = GRPO | {
        "train.num_steps": 6,
        "checkpoint.every": 2,
        "algo.num_sets": 5,
        "algo.advantages": "marginal_set",
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_tiny(whole, (), Dying(fails=False), changes=changes)
    rows = rows_of(whole)
    assert [row["data/with_signal"] for row in rows] == [3] * 6 and sum(row["data/drawn"] for row in rows) > 24
    with pytest.raises(ServerError):
        train_tiny(parts, (), Dying(fails=True), changes=changes)
    assert 2 <= len(rows_of(parts)) < 6
    train_tiny(parts, (), Dying(fails=False), changes=changes)
    for name in ("metrics.jsonl", "generations.jsonl"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    advantages = {row["problem"]: row["advantage"] for row in read_rows(whole / "generations.jsonl")}
    assert advantages["q"] == 0 and None not in advantages.values()


@pytest.mark.parametrize(
    "changes", [{"train.max_draws": 100}, {"train.refill": True, "train.max_draws": 10}], ids=["off", "few"]
)
def test_an_unusable_maximum_is_rejected(changes: dict[str, Any]):
    config = default.get_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=r"train\.max_draws=\d+ .*train\.refill=True"):
        read_config(config)
