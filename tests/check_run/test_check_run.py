"""Tests of the bands of recipes, and of the command that compares a run with them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poly_epo_jax.check_run import bands as module
from poly_epo_jax.check_run.__main__ import main
from poly_epo_jax.check_run.bands import METRICS, Bands, differing_keys, find_bands, summary, values_at
from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.section import read_section
from poly_epo_jax.metrics.intervals import prediction_interval
from poly_epo_jax.report.folders import RunRecords
from poly_epo_jax.report.page import bands_section
from poly_epo_jax.startup.config_file import load_config

FILES = sorted((Path(module.__file__).parent / "bands").glob("*.json"))
STORED = [Bands(**json.loads(path.read_text())) for path in FILES]


def recipe(text: str) -> dict[str, Any]:
    return json.loads(json.dumps(read_section(Config, load_config(text).to_dict()).to_dict()))


def rows_of(values: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    """Returns rows of metrics.jsonl: metrics of updates have the same value in all steps since the last evaluation."""
    rows, previous = [], 0
    for step in next(iter(values.values())):
        update = {metric: by_step[step] for metric, by_step in values.items() if not metric.startswith("eval/")}
        rows += [{"step": one, **update} for one in range(previous + 1, step + 1)]
        rows.append({"step": step, **{metric: by_step[step] for metric, by_step in values.items()}})
        rows[-1] = {key: value for key, value in rows[-1].items() if key == "step" or key.startswith("eval/")}
        previous = step
    return rows


def rows_of_seed(bands: Bands, index: int) -> list[dict[str, Any]]:
    return rows_of(
        {name: {int(step): one[index] for step, one in by_step.items()} for name, by_step in bands.values.items()}
    )


def without(bands: Bands, index: int) -> Bands:
    values = {
        name: {step: [*one[:index], *one[index + 1 :]] for step, one in by_step.items()}
        for name, by_step in bands.values.items()
    }
    return Bands(bands.config, bands.versions, [*bands.seeds[:index], *bands.seeds[index + 1 :]], values)


@pytest.mark.parametrize(("count", "level"), [(2, 0.9), (5, 0.95), (8, 0.999)])
def test_a_prediction_interval_contains_the_value_of_a_further_seed_with_its_level(count: int, level: float):
    rng, trials = np.random.default_rng(0), 2000
    missed = 0
    for _ in range(trials):
        *values, further = rng.normal(3.0, 0.2, count + 1)
        low, high = prediction_interval(np.array(values), level)
        missed += not low <= further <= high
    expected = trials * (1 - level)
    assert abs(missed - expected) < 4 * max(expected, 1) ** 0.5


def test_values_that_are_equal_have_a_band_of_the_smallest_deviation():
    low, high = prediction_interval(np.ones(8), 0.99, 0.01)
    assert 1 - low == pytest.approx(high - 1) and 0.03 < high - 1 < 0.05


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_run_of_the_recipe_is_outside_at_most_as_often_as_stated(correlation: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ERROR", 0.2)
    rng, steps, trials, outside = np.random.default_rng(1), (20, 40), 250, 0
    for _ in range(trials):
        common = rng.normal(size=(1, 1, 9)) * correlation**0.5
        drawn = 0.5 + 0.05 * (common + (1 - correlation) ** 0.5 * rng.normal(size=(len(METRICS), len(steps), 9)))
        seeds = {
            name: {str(step): drawn[i, j, :8].tolist() for j, step in enumerate(steps)}
            for i, name in enumerate(METRICS)
        }
        new = {name: {step: drawn[i, j, 8] for j, step in enumerate(steps)} for i, name in enumerate(METRICS)}
        compared = Bands({}, {}, range(8), seeds).compare(rows_of(new))
        assert len(compared) == len(METRICS) * len(steps)
        outside += not all(one.is_inside for one in compared)
    # If the values are independent, the probability is nearly as large as stated: 1 - (1 - 0.2 / 10)^10 = 0.18.
    expected = 0.2 * trials
    assert (0.5 * expected if correlation == 0 else 0) < outside <= expected + 4 * expected**0.5


def test_metrics_of_updates_are_means_since_the_previous_evaluation():
    rows: list[dict[str, Any]] = [{"step": 0, "eval/reward": 0.1}]
    for step in range(1, 5):
        rows.append({"step": step, "policy/entropy": float(step), "response/truncated": None if step == 2 else 0.5})
        if step % 2 == 0:
            rows.append({"step": step, "eval/reward": step / 10})
    found = values_at(rows, [2, 4, 6])
    assert [found["policy/entropy", step] for step in (2, 4)] == [1.5, 3.5]
    assert [found["response/truncated", step] for step in (2, 4)] == [0.5, 0.5]
    assert [found["eval/reward", step] for step in (2, 4)] == [0.2, 0.4]
    assert found["eval/pass@8", 2] is None and ("eval/reward", 6) not in found
    rows = [row for row in rows if row["step"] != 2 or "eval/reward" not in row]
    rows[-1]["eval/pass@8"] = "0.9"
    found = values_at(rows, [2, 4])  # a lost evaluation and a text are missing values
    assert (found["eval/reward", 2], found["eval/reward", 4], found["eval/pass@8", 4]) == (None, 0.4, None)


@pytest.mark.parametrize("bands", STORED, ids=[path.stem for path in FILES])
def test_the_stored_bands(bands: Bands):
    path = FILES[STORED.index(bands)]
    expected = recipe(path.stem.replace("-", ":", 1))
    assert not differing_keys(dict(bands.config), expected), "train the bands again: benchmarks/bands.py"
    assert find_bands(expected) == bands
    assert set(bands.values) == set(METRICS) and path.stat().st_size < 20_000
    for index in range(len(bands.seeds)):
        assert all(one.is_inside for one in without(bands, index).compare(rows_of_seed(bands, index)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Writes the first seed of the bands of polynomial as a run folder."""
    bands = find_bands(recipe("polynomial"))
    assert bands
    (tmp_path / "config.json").write_text(json.dumps(recipe("polynomial")))
    write_rows(tmp_path, rows_of_seed(bands, 0))
    return tmp_path


def write_rows(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_of_the_recipe(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "configuration: as in the recipe polynomial" in out and "curves: inside" in out and "OUTSIDE" not in out


def test_a_changed_rate_and_method_are_named(run: Path, capsys: pytest.CaptureFixture[str]):
    config = recipe("polynomial:grpo")
    config["optimizer"]["learning_rate"], config["seed"], config["workdir"] = 0.001, 7, "elsewhere"
    (run / "config.json").write_text(json.dumps(config))
    assert main([str(run)]) == 1
    out = capsys.readouterr().out
    assert "optimizer.learning_rate: 0.001 instead of 0.0005" in out
    assert "algo.advantages: 'grpo' instead of 'marginal_set'" in out
    assert "seed" not in out.partition("curves")[0] and "workdir" not in out
    assert main([str(run), "--config=polynomial:grpo"]) == 1  # because of the rate
    assert "curves: no bands yet" in capsys.readouterr().out


def test_fewer_strategies_and_a_missing_metric_are_outside(run: Path, capsys: pytest.CaptureFixture[str]):
    rows = read_rows(run)
    for row in rows:
        if "eval/reward" in row:
            row["eval/correct_clusters@8"] /= 3
            del row["eval/pass@8"]
    write_rows(run, rows)
    assert main([str(run)]) == 1
    outside = [line for line in capsys.readouterr().out.splitlines() if line.endswith("OUTSIDE")]
    assert len(outside) == sum("eval/reward" in row for row in rows) * 2
    assert any("not logged" in line for line in outside)


def test_a_run_in_progress(run: Path, capsys: pytest.CaptureFixture[str]):
    rows = read_rows(run)
    first = next(row["step"] for row in rows if "eval/reward" in row)
    write_rows(run, [row for row in rows if row["step"] <= first])
    assert main([str(run)]) == 0
    assert f"up to step {first} " in capsys.readouterr().out
    write_rows(run, [row for row in rows if row["step"] < first])
    assert main([str(run)]) == 0
    assert "curves: too short" in capsys.readouterr().out


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("task", [{"name": "math"}, {"name": ":grpo"}, {"name": "polynomial:grpo"}, {}, "text", None])
def test_a_task_that_is_not_the_name_of_a_recipe(run: Path, task: Any, capsys: pytest.CaptureFixture[str]):
    (run / "config.json").write_text(json.dumps({"task": task}))
    assert main([str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "task.name=" in error and "set --config" in error


def test_a_folder_of_another_person(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It selects no file to execute, cannot add lines to the output, and contains no links."""
    (tmp_path / "file.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    config = recipe("polynomial")
    (run / "config.json").write_text(json.dumps(config | {"task": {"name": str(tmp_path / "file.py")}}))
    assert main([str(run)]) == 2 and not (tmp_path / "executed").exists()
    (run / "config.json").write_text(json.dumps(config | {"\x1b[31mkey\ncurves: inside": 1}))
    assert main([str(run)]) == 1
    out = capsys.readouterr().out
    assert out.count("\ncurves: ") == 1 and r"\x1b[31mkey\ncurves: inside: 1 instead of None" in out
    (run / "elsewhere").symlink_to("/")
    assert main([str(run)]) == 2
    assert f"{run / 'elsewhere'} is a link" in capsys.readouterr().err


def test_recipes_of_the_working_folder_are_only_executed_if_the_user_names_them(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (run / "configs").mkdir()
    (run / "configs" / "mine.py").write_text("raise ValueError('executed')")
    (run / "config.json").write_text(json.dumps({"task": {"name": "mine"}}))
    monkeypatch.chdir(run)
    assert main(["."]) == 2 and "not the name of a recipe of the project" in capsys.readouterr().err
    assert main([".", "--config=mine"]) == 2 and "executed" in capsys.readouterr().err


def test_the_bands_are_only_those_of_the_same_recipe(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = load_config("polynomial")
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from poly_epo_jax.startup.config_file import load_config\n\n\ndef get_config():\n"
        "    config = load_config('polynomial')\n    config.optimizer.learning_rate *= 2\n    return config\n"
    )
    config = recipe("polynomial")
    config["optimizer"]["learning_rate"] = 2 * source.optimizer.learning_rate
    (run / "config.json").write_text(json.dumps(config))
    assert main([str(run), f"--config={mine}"]) == 0
    out = capsys.readouterr().out
    assert "as in the recipe" in out and "curves: no bands yet" in out


def test_the_section_of_a_report(run: Path):
    bands, config = find_bands(recipe("polynomial")), recipe("polynomial")
    config["optimizer"]["learning_rate"] = 0.001
    own = RunRecords(run, read_rows(run), [], {}, config, [], [])
    other = RunRecords(run, read_rows(run), [], {}, recipe("polynomial:grpo"), [], [])
    page = bands_section({"<mine>": own, "grpo": other})
    assert bands and summary(bands, bands.compare(own.metrics)) in page and "no bands yet" in page
    assert "&lt;mine&gt;" in page and "differ from the recipe: optimizer.learning_rate." in page
