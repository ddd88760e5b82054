"""The training loop: prompts that take part in an update, saved state after failures, and prefetched batches."""

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
from fakes import LETTERS, PROBLEMS, RandomLetters, tiny_params
from tiny_training import saved, tiny_config, tiny_experience, tiny_update, train_tiny
from training_runs import rows_of

from poly_epo_jax import set_rl
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.records import tracking
from poly_epo_jax.records.progress import TrainingProgress
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.rollouts.grading import JudgeError
from poly_epo_jax.step.advantages import Features, make_advantages
from poly_epo_jax.step.objective import DivergenceError
from poly_epo_jax.step.step_metrics import logged_generations
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.train import Trainer
from poly_epo_jax.types import Completion, GradedGroup, Metrics, Params, Problem, Request, Sampling


def changed(before: Params, after: Params) -> list[bool]:
    return [not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (before, after)), strict=True)]


@pytest.mark.slow
def test_a_step_with_only_failed_judgments_does_not_change_weights(tmp_path: Path):
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
def test_one_failed_judgment_excludes_one_prompt(tmp_path: Path):
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
def test_a_method_without_clusters_does_not_depend_on_the_judge(tmp_path: Path):
    settings: dict[str, Any] = {"algo.advantages": "grpo", "judge.max_failed_fraction": 0.0}
    before, after = train_tiny(tmp_path / "judged", changes=settings)
    _, without = train_tiny(tmp_path / "failing", failing=["p", "q"], changes=settings)
    assert all(changed(before, after)) and not any(changed(after, without))

    def rows(run: str, name: str, of_judge: tuple[str, ...]) -> list[dict[str, Any]]:
        found = read_rows(tmp_path / run / name)
        return [{key: row[key] for key in row if not key.startswith(of_judge)} for row in found]

    of_judge = "judge/", "eval/", "clusters/"
    assert rows("failing", "metrics.jsonl", of_judge) == rows("judged", "metrics.jsonl", of_judge)
    assert rows("failing", "generations.jsonl", ("cluster",)) == rows("judged", "generations.jsonl", ("cluster",))
    assert [row["judge/failed_prompts"] for row in rows_of(tmp_path / "failing")] == [2, 2]


@pytest.mark.slow
def test_failed_judgments_can_exclude_prompts_with_every_method(tmp_path: Path):
    settings: dict[str, Any] = {"judge.on_failure": "drop_always", "eval.every": 0, "train.num_steps": 1}
    trained = []
    for method in ("marginal_set", "grpo"):
        train_tiny(tmp_path / method, failing=["q"], changes=settings | {"algo.advantages": method})
        rows = read_rows(tmp_path / method / "generations.jsonl")
        trained.append({(row["problem"], row["response"]) for row in rows if row["advantage"] is not None})
        assert {row["problem"] for row in rows if row["advantage"] is None} == {"q"}
    assert trained[0] == trained[1]
    with pytest.raises(JudgeError, match="failed on 2 of 3 prompts"):
        strict = {"algo.advantages": "grpo", "judge.max_failed_fraction": 0.5}
        train_tiny(tmp_path / "strict", failing=["p", "q"], changes=settings | strict)


@pytest.mark.slow
def test_failed_judgments_can_count_as_distinct_clusters(tmp_path: Path):
    """The clusters are only used for the update. They are not logged, and the failures are counted."""
    changes = {"judge.on_failure": "distinct", "eval.every": 0, "train.num_steps": 1}
    train_tiny(tmp_path, failing=["q"], changes=changes)
    (row,) = rows_of(tmp_path)
    assert (row["judge/failed_prompts"], row["judge/skipped_updates"]) == (1, 0)
    rows = [row for row in read_rows(tmp_path / "generations.jsonl") if row["problem"] == "q"]
    assert {row["cluster"] for row in rows} == {None}
    rewards = np.array([[row["reward"] for row in rows]], np.float32)
    expected = set_rl.polychromic_advantages(rewards, np.arange(8)[None], tiny_config().algo.set_size)
    np.testing.assert_allclose([[row["advantage"] for row in rows]], expected, atol=1e-6)


def made(steps: int) -> list[GradedGroup]:
    """Generates the groups of `steps` steps with three of four problems each. A step may contain a problem twice."""
    experience = tiny_experience(tiny_config(), problems=[*PROBLEMS, Problem("1", "1:", "a")])

    async def groups() -> list[GradedGroup]:
        starts = [(step, 3 * (step - 1)) for step in range(1, steps + 1)]
        return [group for start in starts for group in (await experience.batch(*start)).graded]

    return asyncio.run(groups())


def test_a_repeated_problem_in_a_batch_has_other_generations():
    groups = made(steps=6)
    rows = logged_generations(groups, groups, np.zeros((len(groups), 8)))
    texts = {}
    for index, row in enumerate(rows):
        step = index // (3 * 8)
        texts.setdefault((step, row["problem"], row["occurrence"]), {})[row["generation"]] = row["response"]
    assert sum(map(len, texts.values())) == len(rows) == 6 * 3 * 8  # the four columns together identify a row
    twice = [(step, problem) for step, problem, occurrence in texts if occurrence]
    assert twice and all(texts[(*one, 0)] != texts[(*one, 1)] for one in twice)


class SlowLetters(RandomLetters):
    """Takes 0.2 s per batch, and 0.05 s per push of weights."""

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        await asyncio.sleep(0.2)
        async for completion in super().sample(requests, sampling):
            yield completion

    async def push_weights(self, params: Params, version: int) -> None:
        await asyncio.sleep(0.05)
        await super().push_weights(params, version)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_each_step_records_the_stages_in_progress(tmp_path: Path, staleness: int):
    settings = {"train.num_steps": 4, "train.staleness": staleness, "checkpoint.every": 2, "eval.every": 3}
    train_tiny(tmp_path, (), SlowLetters(), changes=settings)
    rows, timing = read_rows(tmp_path / "timeline.jsonl"), read_rows(tmp_path / "timing.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in timing] == [1, 2, 3, 4]
    for before, row in pairwise(rows):  # windows are consecutive
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
        assert times["sync/step_fraction"] == times["seconds/sync"] / times["seconds/step"]
        exclusive = {
            key.removeprefix("exclusive_seconds/"): times[key] for key in times if key.startswith("exclusive_seconds/")
        }
        assert exclusive.keys() == {stage for stage, *_ in spans} and sum(exclusive.values()) <= times["seconds/step"]
        if not staleness:
            assert exclusive["generate"] >= 0.19


class Failing(RandomLetters):
    """Fails at the n-th generation, or at the n-th push of weights. The first push precedes the first step."""

    def __init__(self, generation: int = 0, push: int = 0):
        super().__init__()
        self.left = {"generation": generation, "push": push}

    def count(self, event: str) -> None:
        self.left[event] -= 1
        if self.left[event] == 0:
            raise ServerError(f"The server failed during the {event}.")

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
def test_completed_steps_are_saved_if_a_server_fails(tmp_path: Path, sampler: Failing, trained: int):
    with pytest.raises(ServerError, match="The server failed"):
        train_tiny(tmp_path, (), sampler, changes={"train.num_steps": 5, "checkpoint.every": 50, "eval.every": 0})
    assert Checkpoints(tmp_path / "checkpoints").steps == ([trained] if trained else [])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, trained + 1))
    if trained:
        assert all(changed(tiny_params(), saved(tmp_path, trained)))


class Uncountable(RandomLetters):
    """Raises an error when its metrics are read in the second step."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def metrics(self) -> dict[str, float]:
        self.calls += 1
        if self.calls == 2:
            raise ServerError("The counts are lost.")
        return {"rollouts/counted": 1.0}


def test_profiled_steps_have_a_trace_and_the_same_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Traces one step in the middle of the run, and steps from the last one on."""
    calls: list[str] = []
    for owner, name in ((jax.profiler, "start_trace"), (jax.profiler, "stop_trace"), (Trainer, "step")):
        function = getattr(owner, name)

        def record(*arguments: Any, _name: str = name, _function: Any = function, **named: Any) -> Any:
            calls.append(_name)
            return _function(*arguments, **named)

        monkeypatch.setattr(owner, name, record)
    start, step, stop = "start_trace", "step", "stop_trace"
    expected = {"": [step] * 3, "2:2": [step, start, step, stop, step], "3:9": [step, step, start, step, stop]}
    update = tiny_update(tiny_config(**{"train.num_steps": 3}))
    for number, (steps, order) in enumerate(expected.items()):
        folder = tmp_path / str(number)
        changes = {"train.num_steps": 3, "train.profile_steps": steps, "workdir": str(folder)}
        calls.clear()
        train_tiny(folder, update=update, changes=changes)
        assert calls == order
        assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "0" / "metrics.jsonl").read_bytes()
        traces = {path.name for path in (folder / "tensorboard").glob("plugins/profile/*/*")}
        assert bool(traces) == bool(steps) == ("perfetto_trace.json.gz" in traces)
        assert any(name.endswith(".xplane.pb") for name in traces) == bool(steps)


def test_every_saved_step_has_a_row(tmp_path: Path):
    with pytest.raises(ServerError, match="The counts are lost"):
        train_tiny(tmp_path, (), Uncountable(), changes={"train.num_steps": 3, "checkpoint.every": 50, "eval.every": 0})
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert (row["step"], row["rollouts/counted"]) == (1, 1.0)
    assert Checkpoints(tmp_path / "checkpoints").steps == [1]


def test_a_judge_that_fails_too_often_stops_the_run(tmp_path: Path):
    with pytest.raises(JudgeError, match="failed on 2 of 3 prompts"):
        train_tiny(tmp_path, ["p", "q"], None, changes={"judge.max_failed_fraction": 0.5, "eval.every": 0})
    assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize(
    ("interval", "remaining"), [(2, "The checkpoint of step 2 is valid"), (50, "No checkpoint has been saved")]
)
def test_a_step_with_non_finite_values_is_not_saved(tmp_path: Path, interval: int, remaining: str):
    estimate = make_advantages(tiny_config().algo, seed=0)

    def advantages(step: int, problems: Sequence[Problem], features: Features) -> np.ndarray:
        return estimate(step, problems, features) * (
            1e30 if step == 4 else 1
        )  # the norm of its gradient overflows float32

    settings = {"train.num_steps": 5, "checkpoint.every": interval, "eval.every": 0}
    with pytest.raises(DivergenceError, match=rf"^Step 4 .*policy/gradient_norm=inf.* was not saved\. {remaining}"):
        train_tiny(tmp_path, advantages=advantages, changes=settings)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert Checkpoints(tmp_path / "checkpoints").steps == ([2] if interval == 2 else [])


class NoLogprobs(RandomLetters):
    """Returns a log-probability of NaN in its second batch."""

    def completion(self, place: int, index: int, text: str) -> Completion:
        completion = super().completion(place, index, text)
        if self.version and index == 1:
            completion.logprobs[0] = np.nan
        return completion


def test_non_finite_log_probabilities_of_a_sampler_are_rejected(tmp_path: Path):
    with pytest.raises(ValueError, match=r"sampler's log-probabilities for problem '.' are not finite"):
        train_tiny(tmp_path / "sampler", (), NoLogprobs(), changes={"eval.every": 0})
    assert Checkpoints(tmp_path / "sampler" / "checkpoints").steps == [1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_batches_are_started_according_to_staleness(staleness: int):
    """0 starts a batch when it is requested, 1 as soon as the previous batch is returned.

    The position of a batch is the number of problems that have been drawn after this batch.
    """
    started = []

    class Watched(RandomLetters):
        async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            started.append(sampling.seed)
            async for completion in super().sample(requests, sampling):
                yield completion

    async def main() -> None:
        changes = {"train.prompts_per_batch": 2, "train.num_steps": 3, "train.staleness": staleness}
        experience = tiny_experience(tiny_config(**changes), Watched())
        for step in (1, 2, 3):
            batch = await experience.batch(step, 2 * (step - 1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert started == list(range(1, min(step + staleness, 3) + 1))
            assert [one.group.problem for one in batch.graded] == experience.problems.draw(2 * (step - 1), 2)
            assert batch.position == 2 * step
        await experience.close()

    asyncio.run(main())


def test_a_step_is_saved_if_its_progress_cannot_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
def test_a_step_is_not_saved_if_its_rows_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    append = tracking.append_rows

    def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        if path.name == name and any(row["step"] == 2 for row in rows):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, rows)

    monkeypatch.setattr(tracking, "append_rows", append_rows)
    with pytest.raises(OSError, match=f"{tmp_path} .No space left on device"):
        train_tiny(tmp_path, changes={"train.num_steps": 3, "eval.every": 0, "checkpoint.every": 1})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]
    assert Checkpoints(tmp_path / "checkpoints").steps == [1]


class Waiting(RandomLetters):
    """Sends a signal to this process at the n-th generation, and then waits for a server that never responds."""

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


# Generations 1 and 4 are evaluations, before the first step and after the second step.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "number", "message"),
    [
        (1, signal.SIGTERM, "SIGTERM: No step was completed. Rerun the command to resume.\n"),
        (2, signal.SIGINT, "Ctrl-C: No step was completed. Rerun the command to resume.\n"),
        (3, signal.SIGHUP, "SIGHUP: Saved after step 1. Rerun the command to resume.\n"),
        (4, signal.SIGINT, "Ctrl-C: Saved after step 2. Rerun the command to resume.\n"),
        (5, signal.SIGTERM, "SIGTERM: Saved after step 2. Rerun the command to resume.\n"),
    ],
)
@pytest.mark.usefixtures("default_signals")
def test_a_signal_interrupts_waiting_for_a_server(
    tmp_path: Path, generation: int, number: signal.Signals, message: str, capsys: pytest.CaptureFixture[str]
):
    settings = {"train.num_steps": 3, "eval.every": 2, "checkpoint.every": 50}
    with pytest.raises(SystemExit) as ended:
        train_tiny(tmp_path, (), Waiting(generation, number), changes=settings)
    assert ended.value.code == 128 + number and capsys.readouterr().err == message
    saved_steps = Checkpoints(tmp_path / "checkpoints").steps
    assert saved_steps == ([int(message.split("step ")[1][0])] if "Saved" in message else [])
    logged = [(row["step"], "eval/reward" in row) for row in read_rows(tmp_path / "metrics.jsonl")]
    rows = [(0, True), (1, False), (2, False), (2, True)]
    assert logged == rows[: {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}[generation]]
