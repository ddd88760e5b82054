"""Prompts on which the environment failed are counted in training and evaluations, and never trained on."""

import asyncio
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import LETTERS, PROBLEMS, ByLetter, LetterJudge, RandomLetters, collect
from tiny_training import tiny_config, tiny_experience, train_tiny

from poly_epo_jax.evaluate.benchmarks import Benchmark
from poly_epo_jax.evaluate.draw import draw_generations
from poly_epo_jax.evaluate.folder import open_folder, read_generations
from poly_epo_jax.evaluate.held_out import evaluate_held_out
from poly_epo_jax.evaluate.results import compute_results
from poly_epo_jax.experience import Batch
from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.rejudge.inputs import read_inputs
from poly_epo_jax.report.generations import evaluation_collection
from poly_epo_jax.rollouts.grading import EpisodeError, JudgeError
from poly_epo_jax.rollouts.groups import generation_seeds
from poly_epo_jax.step.step_metrics import logged_generations, step_metrics
from poly_epo_jax.types import Completion, EpisodeFailure, Generation, Judge, Outcome, Problem, Sampling

EVERY, EMPTY = 5, np.zeros((0, 8), np.float32)


class LetterEpisode:
    def __init__(self):
        self.letter = ""

    async def reply(self, generation: Generation) -> None:
        self.letter = generation.text

    async def close(self) -> Outcome:
        return Outcome(float(self.letter == "a"), ("letter", self.letter), metrics={"tries": 3.0})


class Failing:
    """A task like `ByLetter`, whose environment fails for some problems, and for seeds that `every` divides."""

    train_problems, held_out_problems = ByLetter.train_problems, ByLetter.held_out_problems

    def __init__(self, *failing: str, every: int = 0):
        self.failing, self.every = failing, every

    def start(self, problem: Problem, seed: int) -> Any:
        if problem.id in self.failing or (self.every and seed % self.every == 0):
            raise EpisodeFailure("out of order")
        return LetterEpisode()


def failing_indices(step: int, problem: Problem, num_generations: int, every: int) -> list[int]:
    """Returns the indices of the failing generations, without the code of the package that runs episodes."""
    seeds = generation_seeds(step, problem, num_generations).tolist()
    episodes = [int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]) for seed in seeds]
    return [index for index, seed in enumerate(episodes) if seed % every == 0]


def batch(task: Failing, fraction: float = 0.25, **changes: Any) -> Batch:
    experience = tiny_experience(tiny_config(**{"rollouts.max_failed_fraction": fraction} | changes), task=task)
    return asyncio.run(experience.batch(1, 0))


def test_failed_prompts_are_counted_and_not_trained_on():
    drawn, whole = batch(Failing("q"), fraction=0.5), batch(Failing())
    assert {one.group.problem.id for one in drawn.graded} == {"p", "r"}
    assert [one.group.problem.id for one in drawn.trained[0]] == [one.group.problem.id for one in drawn.graded]
    assert drawn.position == whole.position == len(whole.graded) == 3
    others = [one for one in whole.graded if one.group.problem.id != "q"]
    for one, other in zip(drawn.graded, others, strict=True):
        assert one.rewards.tolist() == other.rewards.tolist()
    counts = {"failed_prompts": 1, "failed_responses": 8, "failed/failed": 8, "retries": 16}
    assert drawn.counts.items() >= {f"environment/{name}": count for name, count in counts.items()}.items()
    assert whole.counts["environment/failed_prompts"] == whole.counts["environment/failed_responses"] == 0
    metrics = step_metrics(drawn.graded, 1, 4)
    assert metrics["episode/turns"] == 1 and metrics["episode/tries"] == 3


@pytest.mark.parametrize("min_group", [0, 7])
def test_exactly_the_failed_responses_are_masked(min_group: int):
    """An independent recount of the rows of generations.jsonl. With the method GRPO, two responses suffice."""
    changes: dict[str, Any] = {"algo.advantages": "grpo", "rollouts.min_group": min_group}
    drawn, whole = batch(Failing(every=EVERY), 0.9, **changes), batch(Failing(), **changes)
    rows = logged_generations([*drawn.graded, *drawn.left_out], drawn.usable, drawn.advantages)
    texts = {
        (row["problem"], row["generation"]): row["response"] for row in logged_generations(whole.graded, [], EMPTY)
    }
    left_out = {one.group.problem.id for one in drawn.left_out}
    sizes = []
    for problem in PROBLEMS:
        own = [row for row in rows if row["problem"] == problem.id]
        failing = failing_indices(1, problem, 8, EVERY)
        assert [row["generation"] for row in own if "failure" in row] == failing
        sizes.append(8 - len(failing))
        assert (problem.id in left_out) == (sizes[-1] < max(2, min_group))
        rewarded = [row for row in own if "failure" not in row]
        assert len(rewarded) == (0 if problem.id in left_out else sizes[-1])
        mean = np.mean([row["reward"] for row in rewarded]) if rewarded else 0
        for row in own:
            if row in rewarded:
                assert row["response"] == texts[problem.id, row["generation"]]
                assert row["advantage"] == pytest.approx(row["reward"] - mean, abs=1e-6)
            else:
                assert (row["failure"], row["reward"], row["correct"], row["advantage"]) == ("failed", None, None, None)
                assert row["reason"].endswith("failed: out of order")
    assert min(sizes) < 7 and max(sizes) >= 7
    counts = {"failed_prompts": len(left_out), "failed_responses": 24 - sum(sizes), "retries": 2 * (24 - sum(sizes))}
    assert drawn.counts.items() >= {f"environment/{name}": count for name, count in counts.items()}.items()
    assert 24 - sum(sizes) > len(left_out) == len(drawn.left_out) == (min_group == 7) * sum(m < 7 for m in sizes)
    rewards = [row["reward"] for row in rows if "failure" not in row]
    assert step_metrics(drawn.graded, 1, 4)["reward"] == pytest.approx(np.mean(rewards))


@pytest.mark.parametrize(
    ("failing", "fraction", "limit"),
    [("q", 0.25, "more than rollouts.max_failed_fraction=0.25 allows"), ("pqr", 1.0, "which leaves no prompt")],
)
def test_too_many_failures_end_the_run(failing: str, fraction: float, limit: str):
    error = rf"failed on \d of 3 prompts, {limit}\. .*failed \(\d+ times\).*out of order"
    with pytest.raises(EpisodeError, match=error):
        batch(Failing(*failing), fraction)


class HalfCorrect(RandomLetters):
    """Responds to each prompt with half of the responses "a"."""

    def completion(self, place: int, index: int, text: str) -> Completion:
        return super().completion(place, index, "ab"[index % 2])


def queue_batches(failing: Sequence[int], fraction: float, judge: Judge | None = None, **changes: Any) -> list[Batch]:
    """Draws four batches of at least five prompts with `train.staleness=3`.

    Args:
      failing: Places of the failing prompts in data order. The first four rounds have the places 0 to 19.
      fraction: Maximum fraction of failures.
      judge: The judge.
      changes: Changes of the configuration.
    """
    problems = [Problem(str(i), f"{i}:", "a") for i in range(60)]
    settings = {"train.prompts_per_batch": 5, "train.num_steps": 20, "train.staleness": 3, "algo.advantages": "grpo"}
    config = tiny_config(**settings | {"rollouts.max_failed_fraction": fraction} | changes)
    names = [problem.id for problem in tiny_experience(config, problems=problems).problems.draw(0, 40)]
    task = Failing(*(names[place] for place in failing))
    experience = tiny_experience(config, HalfCorrect(), task, judge, problems=problems)

    async def draw() -> list[Batch]:
        found = [await experience.batch(1, 0)]
        for step in range(2, 5):
            found.append(await experience.batch(step, found[-1].position))
        await experience.close()
        return found

    return asyncio.run(draw())


def test_failures_are_limited_for_each_batch_and_not_for_the_queue():
    refill: dict[str, Any] = {"train.refill": True, "train.max_draws": 6}
    # The batch of step 2 has places 5 to 10. That of step 3 has places 11 to 16, and all have failed: without a limit
    # for this batch, there would be no groups, because the queue also has the complete places 17 to 19.
    with pytest.raises(EpisodeError, match=r"failed on 6 of 6 prompts.*failed \(48 times\)"):
        queue_batches([5, *range(11, 17)], 0.75, **refill)
    assert [len(batch.graded) for batch in queue_batches([5, *range(11, 16)], 0.9, **refill)] == [5, 5, 1, 5]


def test_a_round_with_a_single_failed_prompt_is_not_a_batch():
    """Step 3 takes all complete groups, up to place 19. Step 4 begins with a round that has only place 20."""
    batches = queue_batches([5, 11, 13, 15, 17, 20], 0.5, **{"train.refill": True, "train.max_draws": 10})
    assert [len(batch.graded) for batch in batches] == [5, 5, 5, 5]
    assert [batch.position for batch in batches] == [5, 11, 20, 26]


@pytest.mark.parametrize("refill", [False, True])
def test_batches_whose_prompts_the_judge_dropped_are_empty_or_end_the_run(refill: bool):
    everything = LetterJudge(failing=[str(i) for i in range(60)])
    changes: dict[str, Any] = {"train.refill": refill, "judge.on_failure": "drop_always"}
    for batch in queue_batches([], 0.0, everything, **changes):
        assert not batch.usable and not batch.trained[0] and batch.trained[1].shape == (0, 8)
        assert len(batch.graded) == (20 if refill else 5)
        metrics = step_metrics(batch.graded, 1, 4)
        assert metrics["judge/failed_prompts"] == len(batch.graded) and "clusters/correct" not in metrics
    with pytest.raises(JudgeError, match="failed on 5 of 5 prompts"):
        queue_batches([], 0.0, everything, **changes | {"judge.max_failed_fraction": 0.9})


@pytest.mark.slow
def test_a_resumed_run_masks_the_same_responses(tmp_path: Path):
    """The resumed run ends after step 1 and continues. Its files are equal, byte for byte."""
    changes = {"eval.every": 0, "rollouts.max_failed_fraction": 0.9}
    for name, ends in (("whole", [3]), ("resumed", [1, 3])):
        for end in ends:
            train_tiny(tmp_path / name, task=Failing(every=EVERY), changes=changes | {"train.num_steps": end})
    for file in ("metrics.jsonl", "generations.jsonl"):
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    rows = read_rows(tmp_path / "whole" / "generations.jsonl")
    masked = {(row["step"], row["problem"], row["generation"]) for row in rows if "failure" in row}
    assert masked == {
        (step, problem.id, index)
        for step in (1, 2, 3)
        for problem in PROBLEMS
        for index in failing_indices(step, problem, 8, EVERY)
    }


def test_evaluations_omit_and_count_failed_problems():
    def evaluate(*failing: str) -> dict[str, float]:
        task, sampler = Failing(*failing), RandomLetters()
        evaluation = evaluate_held_out(sampler.rollouts(task), task, LetterJudge(), PROBLEMS, 8, Sampling(2))
        return asyncio.run(evaluation)

    assert evaluate("q")["eval/environment_failed_problems"] == 1
    assert evaluate("q")["eval/environment/retries"] == 16
    mean = sum(evaluate(*{"p", "q", "r"} - {one})["eval/reward"] for one in "pr") / 2
    assert evaluate("q")["eval/reward"] == pytest.approx(mean)
    with pytest.raises(EpisodeError, match="failed on 3 of 3 prompts"):
        evaluate("p", "q", "r")


def test_evaluations_use_the_remaining_responses():
    """Compares pass@k with an enumeration of the subsets of the remaining responses to each problem."""
    task, sampler = Failing(every=EVERY), RandomLetters()
    found = asyncio.run(evaluate_held_out(sampler.rollouts(task), task, LetterJudge(), PROBLEMS, 8, Sampling(2)))
    correct = []
    for problem in PROBLEMS:
        seeds, failing = generation_seeds(0, problem, 8).tolist(), failing_indices(0, problem, 8, EVERY)
        correct.append([LETTERS[seed % 4] == "a" for index, seed in enumerate(seeds) if index not in failing])
    sizes = [len(of_problem) for of_problem in correct]
    assert (
        found["eval/environment_failed_responses"] == 24 - sum(sizes) > 0 == found["eval/environment_failed_problems"]
    )
    assert found["eval/reward"] == pytest.approx(np.mean([np.mean(of_problem) for of_problem in correct]))
    assert len(set(sizes)) > 1
    for k in (1, 2, 4, max(sizes)):
        means = [np.mean([any(one) for one in combinations(own, k)]) for own in correct if len(own) >= k]
        if (name := f"eval/pass@{k}") in found or k in (1, 2, 4):
            assert found[name] == pytest.approx(np.mean(means))


def test_retries_of_evaluations_are_not_counted_in_training():
    """An evaluation runs while training has repeated episodes that no step has counted yet."""
    task, sampler = Failing("q"), RandomLetters()
    rollouts = sampler.rollouts(task)
    collect(rollouts, PROBLEMS, 1, Sampling(2))
    evaluated = asyncio.run(evaluate_held_out(rollouts, task, LetterJudge(), PROBLEMS, 8, Sampling(2)))
    assert rollouts.environments is not None
    assert rollouts.environments.metrics() == {"environment/retries": 2, "environment/no_room": 0}
    assert evaluated["eval/environment/retries"] == 16


def test_an_evaluation_keeps_other_problems_and_continues(tmp_path: Path):
    def draw(*failing: str, every: int = 0) -> dict[str, str]:
        task, sampler = Failing(*failing, every=every), RandomLetters()
        benchmark = Benchmark("letters", task, PROBLEMS)
        drawing = draw_generations(
            tmp_path, sampler.rollouts(task), benchmark, ExactJudge(task), 4, Sampling(2), lambda count: None
        )
        return asyncio.run(drawing)

    open_folder(tmp_path, {})
    (failed,) = draw("q").items()
    assert failed[0] == "q" and "out of order" in failed[1]
    assert {row["problem"] for row in read_generations(tmp_path)} == {"p", "r"}
    assert draw(every=2) == {}
    rows = list(read_generations(tmp_path))
    masked = [(row["problem"], row["generation"]) for row in rows if row["reward"] is None]
    assert len(rows) == 12 and masked == [("q", index) for index in failing_indices(0, PROBLEMS[1], 4, 2)]
    assert 0 < len(masked) <= 2 and compute_results(tmp_path)["num_failed"] == len(masked)
    assert {group.name: len(group.responses) for group in read_inputs([str(tmp_path)])} == {
        "p": 4,
        "q": 4 - len(masked),
        "r": 4,
    }
    collection, tree = evaluation_collection("model", "letters", tmp_path, "q", 4)
    assert collection is not None and collection["all_generations"] == 12 - len(masked) == 8 + len(tree)
    assert draw() == {}
    rows = list(read_generations(tmp_path))
    assert len(rows) == 12
    for row in rows:
        assert row["turns"] == [row["response"]] and row["strategy"] == repr(("letter", row["response"]))
    # The recorded strategies give the same clusters.
    for group in read_inputs([str(tmp_path)]):
        again = asyncio.run(ExactJudge(Failing()).cluster(group.group(0, range(4))))
        assert tuple(again.ids.tolist()) == group.clusters
