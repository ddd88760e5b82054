"""The training loop: what takes part in an update, what is left when something fails, and working one batch ahead."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fakes import LETTERS, PROBLEMS, ByLetter, LetterJudge, RandomLetters, tiny_params
from tiny_training import saved, tiny_config, train_tiny
from training_runs import rows_of

from poly_epo_jax import set_rl
from poly_epo_jax.experience import Experience
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.parallel import hosts
from poly_epo_jax.records import tracking
from poly_epo_jax.records.progress import TrainingProgress
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.rollouts.grading import JudgeError
from poly_epo_jax.rollouts.prompts import problem_batches
from poly_epo_jax.step.advantages import Features, make_advantages
from poly_epo_jax.step.objective import DivergenceError
from poly_epo_jax.step.step_metrics import logged_generations
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Completion, GradedGroup, Metrics, Params, Problem, Request, Sampling


def changed(before: Params, after: Params) -> list[bool]:
    return [not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (before, after)), strict=True)]


@pytest.mark.slow
def test_a_step_whose_judgements_all_failed_changes_nothing(tmp_path: Path):
    before, after = train_tiny(tmp_path, failing=["p", "q", "r"])
    assert not any(changed(before, after))

    rows = read_rows(tmp_path / "metrics.jsonl")
    evaluated, first, second, again = rows
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    assert [row["judge/failed_prompts"] for row in (first, second)] == [3, 3]
    assert [row["judge/skipped_updates"] for row in (first, second)] == [2, 2]
    assert all(0 < row["reward"] < 1 for row in (first, second))
    assert [row["eval/judge_failed_problems"] for row in (evaluated, again)] == [2, 2]
    assert not [key for row in rows for key in row if key.startswith(("clusters/", "policy/"))]

    generations = read_rows(tmp_path / "generations.jsonl")
    assert len(generations) == 2 * 3 * 8
    assert {(row["cluster"], row["advantage"]) for row in generations} == {(None, None)}
    assert {row["reward"] for row in generations} == {0.0, 1.0}


@pytest.mark.slow
def test_one_failed_judgement_leaves_out_one_prompt(tmp_path: Path):
    before, after = train_tiny(tmp_path, failing=["q"])
    assert all(changed(before, after))
    rows = rows_of(tmp_path)
    assert [(row["judge/failed_prompts"], row["judge/skipped_updates"]) for row in rows] == [(1, 0), (1, 0)]

    generations = read_rows(tmp_path / "generations.jsonl")
    for step in (1, 2):
        for problem in PROBLEMS:
            rows = [row for row in generations if (row["step"], row["problem"]) == (step, problem.id)]
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


@pytest.mark.slow
def test_a_method_that_reads_no_clusters_does_not_depend_on_the_judge(tmp_path: Path):
    settings: dict[str, Any] = {"algo.advantages": "grpo", "judge.max_failed_share": 0.0}
    before, after = train_tiny(tmp_path / "judged", changes=settings)
    _, without = train_tiny(tmp_path / "failing", failing=["p", "q"], changes=settings)
    assert all(changed(before, after)) and not any(changed(after, without))

    def rows(run: str, name: str, of_judge: tuple[str, ...]) -> list[dict[str, Any]]:
        found = read_rows(tmp_path / run / name)
        return [{key: row[key] for key in row if not key.startswith(of_judge)} for row in found]

    of_judge = "judge/", "eval/", "clusters/", "degenerate", "synergy"
    assert rows("failing", "metrics.jsonl", of_judge) == rows("judged", "metrics.jsonl", of_judge)
    assert rows("failing", "generations.jsonl", ("cluster",)) == rows("judged", "generations.jsonl", ("cluster",))
    assert [row["judge/failed_prompts"] for row in rows_of(tmp_path / "failing")] == [2, 2]


def made(steps: int) -> list[GradedGroup]:
    """The groups of so many steps, three of each, of four problems: often one is there twice."""
    experience = Experience(
        *(RandomLetters().rollouts(ByLetter()), ByLetter(), LetterJudge()),
        problem_batches([*PROBLEMS, Problem("1", "1:", "a")], 3, seed=0),
        num_generations=8,
        sampling=lambda step: Sampling(2, seed=step),
        last_step=steps,
        staleness=0,
        reads_judge=True,
        max_failed_share=0.0,
        timeline=Timeline(),
    )

    async def groups() -> list[GradedGroup]:
        return [group for step in range(1, steps + 1) for group in (await experience.batch(step)).graded]

    return asyncio.run(groups())


def test_a_problem_that_is_twice_in_a_batch_has_other_generations():
    groups = made(steps=6)
    rows = logged_generations(groups, groups, np.zeros((len(groups), 8)))
    texts = {}
    for place, row in enumerate(rows):
        step = place // (3 * 8)
        texts.setdefault((step, row["problem"], row["occurrence"]), {})[row["generation"]] = row["response"]
    assert sum(map(len, texts.values())) == len(rows) == 6 * 3 * 8  # so the four together name one row
    twice = [(step, problem) for step, problem, occurrence in texts if occurrence]
    assert twice and all(texts[(*one, 0)] != texts[(*one, 1)] for one in twice)


def test_a_host_s_share_of_a_batch_has_the_generations_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    def texts(part: slice) -> list[list[str]]:
        monkeypatch.setattr(hosts, "share", lambda items: items[part])
        return [[y.text for y in one.group.generations] for one in made(steps=6)]

    whole, first, rest = texts(slice(None)), texts(slice(1)), texts(slice(1, None))
    assert whole[::3] == first and [group for place, group in enumerate(whole) if place % 3] == rest


class SlowLetters(RandomLetters):
    """Each batch takes a while."""

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        await asyncio.sleep(0.2)
        async for completion in super().sample(requests, sampling):
            yield completion

    async def push_weights(self, params: Params, version: int) -> None:
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_each_step_leaves_what_was_under_way_in_it(tmp_path: Path, staleness: int):
    settings = {"train.num_steps": 4, "train.staleness": staleness, "checkpoint.every": 2, "eval.every": 3}
    train_tiny(tmp_path, (), SlowLetters(), changes=settings)
    rows, timing = read_rows(tmp_path / "timeline.jsonl"), read_rows(tmp_path / "timing.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in timing] == [1, 2, 3, 4]
    for before, row in pairwise(rows):  # without a gap
        assert row["start"] == pytest.approx(before["start"] + before["seconds"], abs=2e-4)
    for row, times in zip(rows, timing, strict=True):
        step, spans = row["step"], row["spans"]
        assert all(0 <= start <= end <= row["seconds"] + 1e-4 for _, start, end, _ in spans)
        own = list(dict.fromkeys(stage for stage, _, _, of in spans if of == step))
        makes = ["generate", "grade", "judge"]
        assert own[:3] == makes or (staleness and step > 1)
        trains = ["advantages", "logprobs", "update", "sync", *(["evaluate"] if step in (3, 4) else [])]
        assert [stage for stage in own if stage not in makes] == trains
        others = {(stage, of - step) for stage, _, _, of in spans if of != step}
        assert (("checkpoint", -1) in others) == (step == 3)
        assert (("generate", 1) in others) == (staleness == 1 and step < 4)
        assert times["seconds/step"] == pytest.approx(row["seconds"], abs=1e-4)
        assert times["seconds/generate"] >= 0.2 and times["seconds/sync"] >= 0.05
        assert times["sync/share"] == times["seconds/sync"] / times["seconds/step"]
        critical = {key.removeprefix("critical/"): times[key] for key in times if key.startswith("critical/")}
        assert critical.keys() == {stage for stage, *_ in spans} and sum(critical.values()) <= times["seconds/step"]
        if not staleness:
            assert critical["generate"] >= 0.19


class Failing(RandomLetters):
    """Fails at the n-th generation, or at the n-th push of weights (the first is that before the first step)."""

    def __init__(self, generation: int = 0, push: int = 0):
        super().__init__()
        self.left = {"generation": generation, "push": push}

    def count(self, what: str) -> None:
        self.left[what] -= 1
        if self.left[what] == 0:
            raise ServerError(f"The server died at the {what}.")

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        self.count("generation")
        async for completion in super().sample(requests, sampling):
            yield completion

    async def push_weights(self, params: Params, version: int) -> None:
        self.count("push")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "trained"),
    [(Failing(generation=1), 0), (Failing(generation=3), 2), (Failing(push=1), 0), (Failing(push=4), 3)],
    ids=["first generation", "third generation", "first push", "after the third step"],
)
def test_what_is_trained_is_kept_when_a_server_fails(tmp_path: Path, sampler: Failing, trained: int):
    with pytest.raises(ServerError, match="The server died"):
        train_tiny(tmp_path, (), sampler, changes={"train.num_steps": 5, "checkpoint.every": 50, "eval.every": 0})
    assert Checkpoints(tmp_path / "checkpoints").steps == ([trained] if trained else [])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, trained + 1))
    if trained:
        assert all(changed(tiny_params(), saved(tmp_path, trained)))


class Uncountable(RandomLetters):
    """Cannot say at the second step what it counted."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def metrics(self) -> dict[str, float]:
        self.calls += 1
        if self.calls == 2:
            raise ServerError("The counts are lost.")
        return {"rollouts/counted": 1.0}


def test_every_saved_step_has_its_own_row(tmp_path: Path):
    with pytest.raises(ServerError, match="The counts are lost"):
        train_tiny(tmp_path, (), Uncountable(), changes={"train.num_steps": 3, "checkpoint.every": 50, "eval.every": 0})
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert (row["step"], row["rollouts/counted"]) == (1, 1.0)
    assert Checkpoints(tmp_path / "checkpoints").steps == [1]


def test_a_judge_that_fails_too_often_ends_the_run(tmp_path: Path):
    with pytest.raises(JudgeError, match="failed on 2 of 3 prompts"):
        train_tiny(tmp_path, ["p", "q"], None, changes={"judge.max_failed_share": 0.5, "eval.every": 0})
    assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize(
    ("every", "good"), [(2, "The checkpoint of step 2 is valid"), (50, "No checkpoint has been saved")]
)
def test_nothing_is_saved_of_a_step_that_is_not_finite(tmp_path: Path, every: int, good: str):
    estimate = make_advantages(tiny_config().algo, seed=0)

    def advantages(step: int, features: Features) -> np.ndarray:
        return estimate(step, features) * (1e30 if step == 4 else 1)  # whose gradient has no norm in float32

    settings = {"train.num_steps": 5, "checkpoint.every": every, "eval.every": 0}
    with pytest.raises(DivergenceError, match=rf"^Step 4 .*policy/gradient_norm=inf.* was not saved\. {good}"):
        train_tiny(tmp_path, advantages=advantages, changes=settings)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert Checkpoints(tmp_path / "checkpoints").steps == ([2] if every == 2 else [])


class NoLogprobs(RandomLetters):
    """Its second batch has a log-probability that is not a number."""

    def completion(self, place: int, index: int, text: str) -> Completion:
        completion = super().completion(place, index, text)
        if self.version and index == 1:
            completion.logprobs[0] = np.nan
        return completion


def test_what_comes_from_outside_must_be_finite(tmp_path: Path):
    with pytest.raises(ValueError, match=r"sampler's log-probabilities for problem . are not finite"):
        train_tiny(tmp_path / "sampler", (), NoLogprobs(), changes={"eval.every": 0})
    assert Checkpoints(tmp_path / "sampler" / "checkpoints").steps == [1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_batches_are_begun_when_they_should_be(staleness: int):
    """At 0 when they are asked for; at 1 as soon as the one before is handed out. The data stands after what was."""
    begun = []

    class Watched(RandomLetters):
        async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            begun.append(sampling.seed)
            async for completion in super().sample(requests, sampling):
                yield completion

    async def main() -> None:
        batches = problem_batches(PROBLEMS, 2, seed=0)
        again = problem_batches(PROBLEMS, 2, seed=0)
        experience = Experience(
            *(
                Watched().rollouts(ByLetter()),
                ByLetter(),
                LetterJudge(),
                batches,
                4,
                lambda step: Sampling(2, seed=step),
            ),
            last_step=3,
            staleness=staleness,
            reads_judge=True,
            max_failed_share=0.0,
            timeline=Timeline(),
        )
        for step in (1, 2, 3):
            batch = await experience.batch(step)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert begun == list(range(1, min(step + staleness, 3) + 1))
            expected = next(again)
            assert [one.group.problem for one in batch.graded] == expected
            assert batch.data_state == again.get_state()
        await experience.close()

    asyncio.run(main())


def test_a_step_whose_progress_cannot_be_shown_is_saved_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The standard output of a run may be closed, for example by `head`."""

    def show(self: TrainingProgress, step: int, values: Metrics) -> None:
        if step == 2:
            raise BrokenPipeError("standard output is closed")

    monkeypatch.setattr(TrainingProgress, "show", show)
    with pytest.raises(BrokenPipeError):
        train_tiny(tmp_path, changes={"train.num_steps": 3, "eval.every": 2, "checkpoint.every": 50})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 2]
    assert Checkpoints(tmp_path / "checkpoints").steps == [2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "generations.jsonl"])
def test_a_step_whose_rows_cannot_be_written_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    append = tracking.append_rows

    def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        if path.name == name and any(row["step"] == 2 for row in rows):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, rows)

    monkeypatch.setattr(tracking, "append_rows", append_rows)
    with pytest.raises(OSError, match="cannot write to the run folder"):
        train_tiny(tmp_path, changes={"train.num_steps": 3, "eval.every": 0, "checkpoint.every": 1})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]
    assert Checkpoints(tmp_path / "checkpoints").steps == [1]


class Waiting(RandomLetters):
    """At its n-th generation it waits for a server that never answers, once it was told to end."""

    def __init__(self, generation: int, number: signal.Signals):
        super().__init__()
        self.left, self.number = generation, number

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)
            await asyncio.Event().wait()
        async for completion in super().sample(requests, sampling):
            yield completion


# Generations 1 and 4 are those of the evaluations, before the first step and after the second.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "number", "said"),
    [
        (1, signal.SIGTERM, "SIGTERM: No step was completed. Rerun the command to resume.\n"),
        (2, signal.SIGINT, "Ctrl-C: No step was completed. Rerun the command to resume.\n"),
        (3, signal.SIGHUP, "SIGHUP: Saved after step 1. Rerun the command to resume.\n"),
        (4, signal.SIGINT, "Ctrl-C: Saved after step 2. Rerun the command to resume.\n"),
        (5, signal.SIGTERM, "SIGTERM: Saved after step 2. Rerun the command to resume.\n"),
    ],
)
@pytest.mark.usefixtures("default_signals")
def test_a_signal_is_honoured_while_a_server_is_awaited(
    tmp_path: Path, generation: int, number: signal.Signals, said: str, capsys: pytest.CaptureFixture[str]
):
    settings = {"train.num_steps": 3, "eval.every": 2, "checkpoint.every": 50}
    with pytest.raises(SystemExit) as ended:
        train_tiny(tmp_path, (), Waiting(generation, number), changes=settings)
    assert ended.value.code == 128 + number and capsys.readouterr().err == said
    saved_steps = Checkpoints(tmp_path / "checkpoints").steps
    assert saved_steps == ([int(said.split("step ")[1][0])] if "Saved" in said else [])
    logged = [(row["step"], "eval/reward" in row) for row in read_rows(tmp_path / "metrics.jsonl")]
    rows = [(0, True), (1, False), (2, False), (2, True)]
    assert logged == rows[: {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}[generation]]
