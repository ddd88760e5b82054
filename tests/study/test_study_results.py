"""Tests of study results: means of finished runs, unfinished runs, and paired differences."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_studies import NUM_STEPS, write_fake_evaluation, write_fake_run, write_fake_study

from poly_epo_jax.metrics.intervals import mean_interval
from poly_epo_jax.study.folder import RunState, last_row, run_state
from poly_epo_jax.study.results import CORRECT_OF_8, REWARD, read_results
from poly_epo_jax.study.tables import result_tables

SETS = ("polynomial", "poly_epo", 5e-4)
GRPO = ("polynomial", "grpo", 5e-4)


def test_means_are_over_seeds_and_differences_are_paired_by_seed(tmp_path: Path):
    write_fake_study(tmp_path)
    results = read_results(tmp_path)
    luck = [np.random.default_rng(seed).normal(0, 0.02) for seed in (0, 1, 2)]
    assert results.interval(SETS, REWARD) == pytest.approx(mean_interval(0.9 + np.array(luck)))
    # The effect of a seed is equal for both methods, so the difference does not vary although the means do.
    assert results.difference(SETS, REWARD) == pytest.approx((-0.05, -0.05, -0.05))
    assert results.difference(GRPO, REWARD) is None
    assert results.interval(SETS, "nothing") is None
    assert (results.tasks, results.learning_rates) == (["polynomial"], [1e-4, 5e-4])


def test_unfinished_runs_are_excluded_from_means(tmp_path: Path):
    *_, stopped, missing = write_fake_study(tmp_path)
    assert (stopped.method, stopped.seed, missing.method, missing.seed) == ("grpo", 2, "grpo_div", 2)
    for run_key in (stopped, missing):
        shutil.rmtree(tmp_path / run_key.task / run_key.name)
    write_fake_run(tmp_path, stopped, num_steps=12)
    results = read_results(tmp_path)
    assert list(results.by_seed(GRPO, REWARD)) == [0, 1]
    (run,) = results.of(GRPO, finished=False)
    assert str(run.state) == f"step 12 of {NUM_STEPS}" and run.at_end(CORRECT_OF_8) is not None
    states = {result.key: str(result.state) for result in results.results}
    assert states[missing] == "not started"
    assert results.difference(SETS, REWARD) == pytest.approx((-0.05, -0.05, -0.05)), (
        "over the two seeds that both methods have"
    )


def test_separate_evaluations_are_metrics_with_the_benchmark_as_prefix(tmp_path: Path):
    run_keys = write_fake_study(tmp_path, tasks=("a", "b"), learning_rates=(1e-3,))
    for run_key in run_keys:
        if run_key.task == "b":
            write_fake_evaluation(tmp_path, run_key, "aime")
    results = read_results(tmp_path)
    assert "aime: pass@8" in results.metrics("b") and "aime: pass@2" not in results.metrics("b")
    assert not any(name.startswith("aime") for name in results.metrics("a"))
    assert results.interval(("b", "grpo", 1e-3), "aime: pass@8") == pytest.approx(
        mean_interval(np.array([0.5, 0.51, 0.52]))
    )


def change_last_row(folder: Path, **values: float | None) -> None:
    """Sets the values of the last row of metrics.jsonl, or removes those that are None."""
    *rows, last = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    last = {name: value for name, value in (last | values).items() if value is not None}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, last]))


def test_a_seed_without_graded_rewards_is_not_left_out(tmp_path: Path):
    """Evaluations whose rewards are all 0 or 1 lack the metrics of graded rewards, which then equal pass@k."""
    run_keys = write_fake_study(tmp_path, learning_rates=(5e-4,))
    cell = [key for key in run_keys if key.method == "poly_epo"]
    for run_key, graded in zip(cell, (0.5, None, None), strict=True):
        change_last_row(tmp_path / run_key.path, **{"eval/best_reward@8": graded, "eval/pass@8": 0.0})
        write_fake_evaluation(tmp_path, run_key)
        file = tmp_path / "evaluation" / "polynomial" / run_key.label / "results.json"
        results = json.loads(file.read_text())
        results["metrics"] |= {"pass@1": {"mean": 0.0}} | ({"mean_reward": {"mean": 0.5}} if graded else {})
        file.write_text(json.dumps(results))
    results = read_results(tmp_path)
    for metric in ("eval/best_reward@8", "polynomial: mean_reward"):
        assert metric in results.metrics("polynomial")
        assert results.by_seed(SETS, metric) == {0: 0.5, 1: 0.0, 2: 0.0}
    assert "eval/mean_reward" not in results.metrics("polynomial")
    assert not {name for name in results.metrics("polynomial") if "best_reward@64" in name}


def test_the_last_evaluation_is_not_replaced_by_an_earlier_one(tmp_path: Path):
    """The judge failed in the last evaluation of one seed, whose clusters are therefore unknown."""
    run_keys = write_fake_study(tmp_path, learning_rates=(5e-4,))
    failed = next(key for key in run_keys if key.method == "poly_epo")
    change_last_row(tmp_path / failed.path, **{CORRECT_OF_8: None})
    results = read_results(tmp_path)
    assert list(results.by_seed(SETS, CORRECT_OF_8)) == [1, 2] and list(results.by_seed(SETS, REWARD)) == [0, 1, 2]
    header, row, *_ = result_tables(results, "polynomial")[""]
    cells = dict(zip(header, row, strict=True))
    assert cells["seeds"] == "3 of 3" and cells["Held-out correct clusters@8"].endswith("(2 seeds)")
    assert "seeds" not in cells["Held-out reward"]


def test_evaluations_of_replaced_weights_are_omitted(tmp_path: Path):
    first, second, *_ = write_fake_study(tmp_path, evaluated=True)
    for run_key, evaluated in ((first, "1"), (second, "2")):
        record = tmp_path / run_key.path / "checkpoints" / str(NUM_STEPS) / "data" / "metadata"
        record.parent.mkdir()
        record.write_text('{"digest": "1"}')
        file = tmp_path / "evaluation" / "polynomial" / run_key.label / "results.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"digests": {"weights": evaluated}}))
    results = {result.key: result.evaluations.keys() for result in read_results(tmp_path).results}
    assert results.pop(second) == set()
    assert all(benchmarks == {"polynomial"} for benchmarks in results.values())


def test_run_state_is_read_from_the_last_complete_row(tmp_path: Path):
    run = tmp_path / "run"
    assert run_state(run) == RunState() and str(run_state(run)) == "not started"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"train": {"num_steps": 3}, "eval": {"every": 3}}))
    assert run_state(run) == RunState(0, 3)
    (run / "metrics.jsonl").write_text('{"step": 2, "long": "' + "x" * 70_000 + '"}\n{"step": 3}\n{"step": 4')
    assert last_row(run / "metrics.jsonl") == {"step": 3} and run_state(run) == RunState(3, 3, is_finished=False)
    (run / "checkpoints" / "3").mkdir(parents=True)
    assert not run_state(run).is_finished  # stopped during the evaluation after the last step
    (run / "metrics.jsonl").write_text('{"step": 3}\n{"step": 3, "eval/reward": 0.5}\n')
    assert run_state(run).is_finished


@pytest.mark.parametrize("plan", [None, "{", "[]", '{"runs": [{"task": "a"}]}'])
def test_invalid_study_folder_produces_an_error(tmp_path: Path, plan: str | None):
    if plan is not None:
        (tmp_path / "study.json").write_text(plan)
    with pytest.raises(ValueError, match=r"study\.json; run the study first"):
        read_results(tmp_path)
