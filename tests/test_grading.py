"""Groups are graded while others are still generated, and a prompt whose judge failed takes no part in the update."""

import asyncio
import math
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from fakes import TINY_MODEL, optimizer_config, tiny_params
from ml_collections import ConfigDict

from configs import default
from poly_epo_jax import set_rl
from poly_epo_jax.algorithm import make_loss
from poly_epo_jax.checkpoint import Checkpoints
from poly_epo_jax.data import problem_batches
from poly_epo_jax.grading import JudgeError, check_judge, cluster_ids, grade_groups, judged
from poly_epo_jax.model.sharding import make_mesh
from poly_epo_jax.tracking import Tracker, read_rows
from poly_epo_jax.train import Parts, train
from poly_epo_jax.types import Clustering, Generation, Group, JudgeFailure, Params, Problem, Sampling
from poly_epo_jax.update import PolicyUpdate

PROBLEMS = [Problem(id, f"{id}:", "a") for id in ("p", "q", "r")]
LETTERS = "abcd"


def group(problem: Problem, texts: Sequence[str]) -> Group:
    """Responses of one letter, followed by a stop token."""
    generations = [
        Generation(np.array([2 + LETTERS.index(text), 1], np.int32), np.full(2, -1, np.float32), text, "stop", 0)
        for text in texts
    ]
    return Group(problem, np.array([7, 8], np.int32), tuple(generations))


class ByLetter:
    """The right letter earns 1; each letter is a strategy."""

    train_problems: Sequence[Problem] = PROBLEMS
    held_out_problems: Sequence[Problem] = PROBLEMS[:2]

    def reward(self, problem: Problem, text: str) -> float:
        return float(text == problem.answer)

    def strategy(self, problem: Problem, text: str) -> str:
        return text


class LetterJudge:
    """Clusters by letter, and has no clustering for some problems."""

    def __init__(self, failing: Sequence[str] = ()):
        self.failing = failing

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        if group.problem.id in self.failing:
            return JudgeFailure("broken", "out of order")
        return Clustering(np.array([LETTERS.index(y.text) for y in group.generations], np.int32))


async def stream(groups: Sequence[Group]) -> AsyncIterator[Group]:
    for one in groups:
        yield one


def test_results_follow_the_order_of_the_problems():
    groups = [group(PROBLEMS[i], texts) for i, texts in ((2, "ab"), (0, "ca"), (1, "dd"))]
    graded, _ = asyncio.run(grade_groups(stream(groups), PROBLEMS, ByLetter(), LetterJudge()))
    assert [one.group for one in graded] == [groups[1], groups[2], groups[0]]
    np.testing.assert_array_equal([one.rewards for one in graded], [[0, 1], [0, 0], [1, 0]])
    np.testing.assert_array_equal(cluster_ids(graded), [[2, 0], [3, 3], [0, 1]])
    assert {one.rewards.dtype for one in graded} == {np.dtype(np.float32)}


def test_grading_overlaps_generation():
    """Each prompt is generated only once the one before it has been judged: without overlap this never ends."""

    async def main() -> list[str]:
        was_judged = {problem.id: asyncio.Event() for problem in PROBLEMS}
        happened = []

        async def generate() -> AsyncIterator[Group]:
            for problem in PROBLEMS:
                happened.append(f"generate {problem.id}")
                yield group(problem, "ab")
                await was_judged[problem.id].wait()

        class Watched(LetterJudge):
            async def cluster(self, group: Group):
                happened.append(f"judge {group.problem.id}")
                was_judged[group.problem.id].set()
                return await super().cluster(group)

        await asyncio.wait_for(grade_groups(generate(), PROBLEMS, ByLetter(), Watched()), timeout=20)
        return happened

    assert asyncio.run(main()) == [f"{verb} {problem.id}" for problem in PROBLEMS for verb in ("generate", "judge")]


def test_groups_are_judged_at_once():
    """Every judgement waits until all have begun."""

    async def main() -> None:
        barrier = asyncio.Barrier(len(PROBLEMS))

        class Patient(LetterJudge):
            async def cluster(self, group: Group):
                await barrier.wait()
                return await super().cluster(group)

        groups = [group(problem, "ab") for problem in PROBLEMS]
        await asyncio.wait_for(grade_groups(stream(groups), PROBLEMS, ByLetter(), Patient()), timeout=20)

    asyncio.run(main())


def test_a_failed_judgement_keeps_its_reason_and_is_not_among_the_judged():
    groups = [group(problem, "ab") for problem in PROBLEMS]
    graded, _ = asyncio.run(grade_groups(stream(groups), PROBLEMS, ByLetter(), LetterJudge(failing=["q"])))
    assert graded[1].clustering == JudgeFailure("broken", "out of order")
    check_judge(graded, max_failed_share=0.34)
    with pytest.raises(JudgeError, match=r"failed on 1 of 3 prompts, more than .*=0\.33 allows; 1 times it was broken"):
        check_judge(graded, max_failed_share=0.33)
    np.testing.assert_array_equal(graded[1].rewards, [1, 0])
    assert judged(graded) == [graded[0], graded[2]]


def test_a_reward_that_is_no_number_is_refused():
    class Undecided(ByLetter):
        def reward(self, problem: Problem, text: str) -> float:
            return math.nan

    with pytest.raises(ValueError, match="reward for problem p is NaN; it must be a number"):
        asyncio.run(grade_groups(stream([group(PROBLEMS[0], "ab")]), PROBLEMS, Undecided(), LetterJudge()))


def test_an_error_in_a_reward_is_not_swallowed():
    class Broken(ByLetter):
        def reward(self, problem: Problem, text: str) -> float:
            raise ZeroDivisionError(problem.id)

    with pytest.raises(ZeroDivisionError, match="p"):
        asyncio.run(grade_groups(stream([group(PROBLEMS[0], "ab")]), PROBLEMS, Broken(), LetterJudge()))


class RandomLetters:
    """Responses that follow from the seed alone."""

    async def generate(
        self, problems: Sequence[Problem], num_generations: int, sampling: Sampling
    ) -> AsyncIterator[Group]:
        rng = np.random.default_rng(sampling.seed)
        for problem in problems:
            yield group(problem, [LETTERS[i] for i in rng.integers(4, size=num_generations)])

    async def update_weights(self, params: Params, version: int) -> None:
        pass

    def close(self) -> None:
        pass


def tiny_config() -> ConfigDict:
    config = default.get_config()
    config.update_from_flattened_dict(
        {
            "train.num_steps": 2,
            "train.prompts_per_batch": 3,
            "train.prompts_per_minibatch": 2,
            "train.num_generations": 8,
            "train.row_tokens": 8,
            "train.rows_per_microbatch": 4,
            "checkpoint.every": 1,
            "eval.every": 2,
            "eval.num_generations": 2,
            "log.samples_every": 1,
        }
    )
    return config


@pytest.fixture
def restored_sigterm() -> Iterator[None]:
    """Training catches SIGTERM for the rest of the process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def train_tiny(run_dir: Path, failing: Sequence[str], max_failed_share: float = 1.0) -> tuple[Params, Params]:
    """Trains for two steps into a run folder; returns the weights before and after, the latter from the checkpoint."""
    config, mesh = tiny_config(), make_mesh(1, 1, 1)
    config.judge.max_failed_share = max_failed_share
    update = PolicyUpdate(TINY_MODEL, mesh, make_loss(config.algo), optimizer_config(), total_updates=4)
    checkpoints = Checkpoints(run_dir / "checkpoints")
    with Tracker(run_dir, "{}", config.train.num_steps, -1) as tracker:
        parts = Parts(
            task=ByLetter(),
            held_out=ByLetter.held_out_problems,
            judge=LetterJudge(failing),
            rollouts=RandomLetters(),
            batches=problem_batches(PROBLEMS, 3, seed=0),
            update=update,
            state=update.init(tiny_params()),
            reference=None,
            checkpoints=checkpoints,
            tracker=tracker,
            step=0,
        )
        asyncio.run(train(config, parts))
    state, _ = Checkpoints(run_dir / "checkpoints").restore(2, update.abstract_state, update.shardings)
    return tiny_params(), state.params


def changed(before: Params, after: Params) -> list[bool]:
    return [not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (before, after)), strict=True)]


@pytest.mark.usefixtures("restored_sigterm")
def test_a_step_whose_judgements_all_failed_changes_nothing(tmp_path: Path):
    before, after = train_tiny(tmp_path, failing=["p", "q", "r"])
    assert not any(changed(before, after))

    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["judge/failed_prompts"] for row in rows[1:]] == [3, 3]
    assert all(0 < row["reward"] < 1 for row in rows[1:])
    assert [row["eval/judge_failed_problems"] for row in (rows[0], rows[2])] == [2, 2]
    assert not [key for row in rows for key in row if key.startswith(("clusters/", "policy/"))]

    samples = read_rows(tmp_path / "samples.jsonl")
    assert len(samples) == 2 * 3 * 8
    assert {(row["cluster"], row["advantage"]) for row in samples} == {(None, None)}
    assert {row["reward"] for row in samples} == {0.0, 1.0}


@pytest.mark.usefixtures("restored_sigterm")
def test_one_failed_judgement_leaves_out_one_prompt(tmp_path: Path):
    before, after = train_tiny(tmp_path, failing=["q"])
    assert all(changed(before, after))
    assert [row["judge/failed_prompts"] for row in read_rows(tmp_path / "metrics.jsonl")[1:]] == [1, 1]

    samples = read_rows(tmp_path / "samples.jsonl")
    for step in (1, 2):
        for problem in PROBLEMS:
            rows = [row for row in samples if (row["step"], row["problem"]) == (step, problem.id)]
            assert [row["generation"] for row in rows] == list(range(8))
            rewards = np.array([[row["reward"] for row in rows]], np.float32)
            np.testing.assert_array_equal(rewards, [[row["response"] == "a" for row in rows]])
            if problem.id == "q":
                assert {(row["cluster"], row["advantage"]) for row in rows} == {(None, None)}
                continue
            clusters = np.array([[row["cluster"] for row in rows]], np.int32)
            np.testing.assert_array_equal(clusters, [[LETTERS.index(row["response"]) for row in rows]])
            expected = set_rl.polychromic_advantages(rewards, clusters, tiny_config().algo.set_size)
            np.testing.assert_allclose([[row["advantage"] for row in rows]], expected, atol=1e-6)
