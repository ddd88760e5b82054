"""Tests of pass@k in studies: crossing points, tables, and reference models."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_studies import write_fake_study

from poly_epo_jax.study.folder import RunKey
from poly_epo_jax.study.page import write_study_report
from poly_epo_jax.study.pass_at_k import plot_pass_at_k
from poly_epo_jax.study.results import read_results
from poly_epo_jax.study.tables import crossing_point, pass_at_k_tables

KS = (1, 2, 4, 8, 16)
BASE = {k: 0.1 + 0.2 * math.log2(k) for k in KS}
START = {"grpo": 0.35, "poly_epo": 0.55, "grpo_div": 0.0}
"""pass@1 of the methods, whose pass@k grows by 0.1 with each doubling of k."""


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ({k: 0.35 + 0.1 * math.log2(k) for k in KS}, 2**2.5),
        ({k: 0.3 + 0.1 * math.log2(k) for k in KS}, 4),
        ({k: 0.0 for k in KS}, 1),
        ({k: 1.0 for k in KS}, math.inf),
        ({1: 0.0, 4: 0.7, 16: 0.7}, 2 ** (2 + 2 * 0.2 / 0.4)),
    ],
    ids=["between powers", "at a power", "below everywhere", "above everywhere", "other k, above only in the middle"],
)
def test_crossing_point(curve: dict[int, float], expected: float):
    assert crossing_point(curve, BASE) == pytest.approx(expected)


def write_curve(folder: Path, label: str, curve: dict[int, float]) -> None:
    path = folder / "evaluation" / "polynomial" / label
    path.mkdir(parents=True)
    metrics = {f"pass@{k}": {"mean": mean, "low": 0.0, "high": 1.0} for k, mean in curve.items()}
    (path / "results.json").write_text(json.dumps({"metrics": metrics, "branching": {"mean": [1.0]}}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Study with three evaluated methods, and the base policies of its tasks. Seeds differ by 0.01 in pass@k."""
    run_keys: list[RunKey] = write_fake_study(tmp_path, ("polynomial", "other"), (5e-4,), (0, 1))
    for key in run_keys:
        slope, start = 0.1, START[key.method] + 0.01 * key.seed
        write_curve(tmp_path, key.label, {k: start + slope * math.log2(k) for k in KS})
    write_curve(tmp_path, "base", BASE)
    write_curve(tmp_path, "other-even", dict.fromkeys(KS, 0.2))
    return tmp_path


def test_tables_contain_references_crossing_points_and_differences(folder: Path):
    tables = pass_at_k_tables(read_results(folder), "polynomial", "polynomial")
    (header, base, poly_epo, grpo, grpo_div), (_, *differences) = tables.values()
    assert header[2:] == ["pass@1", "pass@4", "pass@16", "below base from k", "problems ever solved"]
    assert base == ["base", "-", "0.100", "0.500", "0.900", "-", "-"]
    assert grpo[2:4] == ["0.355 [0.291, 0.419]", "0.555 [0.491, 0.619]"]
    assert grpo[-2].startswith("6 [") and grpo[-1] == "1600 [1594, 1607]"
    assert poly_epo[-2] == "not in 2 of 2 seeds"
    assert grpo_div[-2].startswith("1")
    assert [row[0] for row in differences] == ["poly_epo", "grpo_div"]
    assert differences[0][2:] == ["+0.200"] * 3


def test_references_belong_to_all_tasks_or_to_the_task_in_their_label(folder: Path):
    results = read_results(folder)
    assert list(results.references("polynomial", "polynomial")) == ["base"]
    assert list(results.references("other", "polynomial")) == ["base", "even"]


def test_the_reference_of_a_task_whose_name_begins_with_that_of_another(tmp_path: Path):
    write_fake_study(tmp_path, ("poly", "poly-hard"), (5e-4,), (0,))
    for label in ("poly-base", "poly-hard-base"):
        write_curve(tmp_path, label, BASE)
    results = read_results(tmp_path)
    assert [list(results.references(task, "polynomial")) for task in ("poly", "poly-hard")] == [["base"], ["base"]]


def test_evaluations_without_finished_runs_have_no_table(folder: Path):
    """Checkpoints were deleted, so that no run counts as finished."""
    for checkpoints in folder.glob("*/*/checkpoints"):
        shutil.rmtree(checkpoints)
    shutil.rmtree(folder / "evaluation" / "polynomial" / "base")
    results = read_results(folder)
    assert results.benchmarks("polynomial") == ["polynomial"]
    assert pass_at_k_tables(results, "polynomial", "polynomial") == {}


def test_runs_that_the_study_no_longer_contains_are_no_references(folder: Path):
    plan = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(plan | {"runs": [run for run in plan["runs"] if run["seed"] == 0]}))
    assert list(read_results(folder).references("polynomial", "polynomial")) == ["base"]


def test_figure_contains_methods_and_dashed_references(folder: Path):
    figure = plot_pass_at_k(read_results(folder), "polynomial", "polynomial")
    assert figure is not None
    base, poly_epo, *_ = figure.axes[0].lines
    assert "base" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert base.get_linestyle() == "--" and np.asarray(base.get_ydata()).tolist() == list(BASE.values())
    assert np.asarray(poly_epo.get_ydata()).tolist() == pytest.approx([0.555 + 0.1 * math.log2(k) for k in KS])
    assert plot_pass_at_k(read_results(folder), "polynomial", "another benchmark") is None


@pytest.mark.slow
def test_tables_are_on_the_page_and_in_the_markdown_file(folder: Path):
    page = write_study_report(folder).read_text(encoding="utf-8")
    text = (folder / "report" / "tables.md").read_text()
    for cell in ("below base from k", "0.355 [0.291, 0.419]", "Difference in pass@k on polynomial from grpo"):
        assert cell in page and cell in text
