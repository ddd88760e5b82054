"""Tests of study reports: figures, tables, unfinished runs, and a self-contained page."""

import base64
import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_studies import NUM_STEPS, attempt, write_fake_run, write_fake_study
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text

from poly_epo_jax.metrics.logged import describe
from poly_epo_jax.report.figures import COMPARED, drawn_metrics
from poly_epo_jax.study import figures
from poly_epo_jax.study.frontier import plot_frontier
from poly_epo_jax.study.page import write_study_report
from poly_epo_jax.study.results import read_results

ROOT = Path(__file__).parents[2]
MARKS = ("o", "s", "^")


def xs(line: Line2D) -> np.ndarray:
    return np.atleast_1d(np.asarray(line.get_xdata(), float))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Study with 18 runs, one of which stopped after a failure, and one of which has not started."""
    folder = tmp_path_factory.mktemp("study") / "whole"
    *_, stopped, missing = write_fake_study(folder, evaluated=True)
    for run_key in (stopped, missing):
        shutil.rmtree(folder / run_key.task / run_key.name)
    write_fake_run(folder, stopped, num_steps=12)
    with (folder / "attempts.jsonl").open("a") as file:
        file.write(json.dumps(attempt(stopped, 1, "no <room>: make some.")) + "\n")
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return write_study_report(folder).read_text(encoding="utf-8")


def svgs(page: str) -> dict[str, str]:
    images = re.findall(r'<img [^>]*alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]*)">', page)
    return {alt: base64.b64decode(data).decode() for alt, data in images}


def text_of(page: str) -> str:
    return re.sub(r"<[^>]+>", " ", page)


@pytest.mark.slow
def test_all_logged_metrics_are_drawn_and_explained(page: str):
    drawn = svgs(page)
    not_logged = ("episode/turns", "policy/reference_kl", "response/looped")
    logged = [describe(metric) for metric in (*COMPARED, *drawn_metrics()) if metric not in not_logged]
    expected = [
        "Frontier",
        "By learning rate",
        "Held-out pass@k",
        "By generations drawn",
        *(metric.title for metric in logged),
    ]
    expected += ["pass@k on polynomial", "Branching on polynomial"]
    assert list(drawn) == [f"{title}: polynomial" for title in expected]
    assert all(metric.meaning in page for metric in logged)
    assert all(f">{method}</text>" in svg for svg in drawn.values() for method in ("poly_epo", "grpo", "grpo_div"))
    assert not any(word in svg for svg in drawn.values() for word in ("nan", "NaN"))


def test_tables_contain_means_differences_and_unfinished_runs(page: str):
    text = " ".join(text_of(page).split())
    assert text.count("2 of 3") == 2, "one method at one learning rate has a stopped run, another a missing one"
    assert "-0.050" in text, "paired difference between poly_epo and grpo"
    assert "-0.050 [" not in text, "equal differences of all seeds have no interval"
    assert "12.800" in text, "correct clusters@64"
    assert "pass@8 (polynomial, evaluated)" in text


def test_tables_and_figures_are_written_as_files(folder: Path, page: str):
    del page  # the fixture writes the files
    lines = (folder / "report" / "tables.md").read_text().splitlines()
    assert "95% confidence intervals (Student's t)" in lines[0] and lines[2] == "## polynomial"
    assert lines[4].startswith("| method | learning rate | seeds | Held-out reward |")
    rows = {tuple(line.split(" | ")[:2]): line for line in reversed(lines) if line.startswith("| grpo_div")}
    assert "| 2 of 3 | " in rows["| grpo_div", "0.0005"] and "| 3 of 3 | " in rows["| grpo_div", "0.0001"]
    first = lines.index("Difference from grpo, by seed:")
    differences = lines[first : lines.index("pass@k on polynomial:")]
    assert sum(line.startswith("| poly_epo |") and "| -0.050 |" in line for line in differences) == 2
    assert not any(line.startswith("| grpo |") for line in differences)
    for name in ("frontier-polynomial", "comparison-polynomial"):
        assert (folder / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / "report" / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_shared_axes_of_fractions_extend_from_0_to_1(folder: Path):
    """All panels of a column share their axes, which the last panel must not leave at other limits."""
    figure = figures.plot_comparison(read_results(folder), "polynomial")
    assert figure is not None
    rewards = [axes for axes in figure.axes if axes.get_title("left") == "Held-out reward"]
    assert [axes.get_ylim() for axes in rewards] == [(-0.03, 1.03)] * 2
    assert {axes.get_xticks()[-1] for axes in figure.axes} == {NUM_STEPS}


def test_comparison_shows_means_of_finished_runs(folder: Path):
    drawn = figures.plot_comparison(read_results(folder), "polynomial")
    assert drawn is not None and len(drawn.axes) == 2 * 3
    assert [axes.get_title("left") for axes in drawn.axes[:3]] == [
        "Held-out reward",
        "Held-out correct clusters@8",
        "Held-out correct clusters@64",
    ]
    assert [axes.get_ylabel() for axes in drawn.axes] == [
        "learning rate 0.0001",
        "",
        "",
        "learning rate 0.0005",
        "",
        "",
    ]
    assert [float(np.asarray(line.get_ydata())[-1]) for line in drawn.axes[1].lines] == pytest.approx([6.4, 1.2, 6.4])


def test_methods_are_compared_by_generations_drawn(folder: Path):
    """Places are means over seeds, whose runs draw 32 or 48 prompts per step, plus their seed."""
    results = read_results(folder)
    drawn, by_step = (figures.plot_comparison(results, "polynomial", by) for by in (True, False))
    assert drawn is not None and by_step is not None
    for method, line, other in zip(results.methods, drawn.axes[0].lines, by_step.axes[0].lines, strict=True):
        per_step = 8 * ((48 if method == "grpo" else 32) + 1)
        np.testing.assert_array_equal(xs(line), per_step * np.arange(0, NUM_STEPS + 1, 5))
        np.testing.assert_array_equal(line.get_ydata(), other.get_ydata())
    assert drawn.axes[-1].get_xlabel() == "generations drawn"
    alone = [one for one in results.results if (one.key.method, one.key.seed) == ("grpo", 0)]
    assert figures.plot_comparison(dataclasses.replace(results, results=alone), "polynomial", True) is None


def test_unfinished_runs_are_marked_with_their_errors(page: str):
    assert "<b>16 of 18 runs finished</b>" in page
    assert f"polynomial/grpo-lr0.0005-seed2 (step 12 of {NUM_STEPS})" in page
    assert "polynomial/grpo_div-lr0.0005-seed2 (not started)" in page
    assert "train, exit code 1: no &lt;room&gt;: make some." in page
    assert "unfinished run (last evaluation)" in svgs(page)["Frontier: polynomial"]


def test_page_contains_settings_versions_and_times(page: str):
    text = " ".join(text_of(page).split())
    assert "run seed train.num_steps" not in text and "run seed algo.advantages optimizer.learning_rate" in text
    assert "all 17 runs 3.12.3 0.10.2 0123456789ab" in text
    assert "0:18:" in text or "0:19:" in text, "19 attempts of 60.5 seconds"


def test_page_has_no_external_resources_and_no_script(page: str):
    assert "<script" not in page and "http://" not in page and "https://" not in page
    assert "default-src 'none'; img-src data:; style-src 'sha256-" in page and "script-src" not in page


def test_overlapping_points_remain_visible(folder: Path):
    """poly_epo and grpo_div have the same results at both learning rates. Both must be visible in all figures."""
    results = read_results(folder)
    drawn = plot_frontier(results, "polynomial")
    assert drawn is not None
    whole, enlarged = drawn.axes
    for axes in (whole, enlarged):
        marks = [line for line in axes.lines if line.get_marker() in MARKS and xs(line).size == 1]
        assert all(mark.get_fillstyle() == "none" for mark in marks)
        assert len({mark.get_markersize() for mark in marks}) == len(marks) == 6, "larger markers enclose smaller ones"
    assert enlarged.get_xlim()[0] > 6 > 1.2 > whole.get_xlim()[0], "the four overlapping points"
    written = {axes: [text for text in axes.texts if isinstance(text, Annotation)] for axes in (whole, enlarged)}
    rates = {axes: [text for text in texts if text.get_text()] for axes, texts in written.items()}
    assert sorted(text.get_text() for text in rates[whole]) == ["0.0001", "0.0005"]
    assert sorted(text.get_text() for text in rates[enlarged]) == ["0.0001"] * 2 + ["0.0005"] * 2
    renderer = FigureCanvasAgg(drawn).get_renderer()
    boxes = []
    for text in (text for texts in rates.values() for text in texts):
        text.update_positions(renderer)
        boxes.append(Text.get_window_extent(text, renderer))  # without the line to the point
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2)), (
        "learning rates do not overlap"
    )

    by_rate = figures.plot_by_rate(results, "polynomial")
    assert by_rate is not None
    for axes in by_rate.axes:
        positions = [float(xs(line)[0]) for line in axes.lines if line.get_marker() in MARKS]
        assert len(set(positions)) == len(positions) > 1


def test_curves_show_means_and_ranges_over_seeds(folder: Path):
    drawn = figures.plot_curves(read_results(folder), "polynomial", "eval/reward")
    assert drawn is not None
    first = drawn.axes[0].lines[0]
    band = np.asarray(drawn.axes[0].collections[0].get_paths()[0].vertices)
    values = [
        [json.loads(row)["eval/reward"] for row in (run / "metrics.jsonl").read_text().splitlines()[::5]]
        for run in sorted((folder / "polynomial").glob("poly_epo-lr0.0001-*"))
    ]
    means = [sum(at) / 3 for at in zip(*values, strict=True)]
    assert np.asarray(first.get_ydata()).tolist() == pytest.approx(means)
    assert {max(at) for at in zip(*values, strict=True)} <= set(band[:, 1].tolist())
    dotted = [line for line in drawn.axes[1].lines if xs(line).size == 3]
    assert len(dotted) == 1, "the unfinished run, up to its evaluation at step 10"


def test_report_of_a_study_without_results(tmp_path: Path):
    run_keys = write_fake_study(tmp_path, learning_rates=(1e-3,), seeds=(0,))
    shutil.rmtree(tmp_path / "polynomial")
    (tmp_path / "attempts.jsonl").unlink()
    assert "No run has been evaluated yet." in write_study_report(tmp_path).read_text()
    write_fake_run(tmp_path, run_keys[0], num_steps=1)
    assert "<b>0 of 3 runs finished</b>" in write_study_report(tmp_path).read_text()


@pytest.mark.slow
def test_single_method_and_seed_have_no_differences_and_intervals(tmp_path: Path):
    run_keys = write_fake_study(tmp_path, learning_rates=(1e-3,), seeds=(0,))
    plan = {"baseline": "grpo", "runs": [vars(run_keys[1])]}
    (tmp_path / "study.json").write_text(json.dumps(plan))
    page = write_study_report(tmp_path).read_text()
    assert "[nan" not in page and "Difference from" not in svgs(page)["By learning rate: polynomial"]


@pytest.mark.slow
def test_report_is_deterministic_and_does_not_import_jax(folder: Path, page: str):
    code = "import sys; from pathlib import Path; from poly_epo_jax.study.page import write_study_report"
    code += f"; write_study_report(Path({str(folder)!r}))"
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}; print('jax' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "False\n"
    assert (folder / "report" / "report.html").read_text(encoding="utf-8") == page
