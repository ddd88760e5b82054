"""Tests of colors, axes and texts of figures, which do not depend on the environment or the user's matplotlibrc."""

import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from test_report import write_fake_run

from poly_epo_jax.metrics.evaluation import PASS
from poly_epo_jax.report import evaluation_figures, figures
from poly_epo_jax.report.folders import read_folders
from poly_epo_jax.report.page import results_tables

NAMES = "中文 $x_1$", "a $ b", "100% \\frac{"
"""Names that mathtext or DejaVu Sans cannot draw."""


def panel_runs(last: int, names: tuple[str, ...] = NAMES) -> dict[str, list[dict[str, float]]]:
    return {name: [{"step": step, "reward": 0.4, "eval/reward": 0.5} for step in range(last + 1)] for name in names}


def test_all_line_styles_are_different():
    """Seven colors with four dashes repeated after 28 runs."""
    found = figures.styles([f"run {number}" for number in range(200)])
    assert len({(style["color"], str(style["linestyle"])) for style in found.values()}) == 200
    axes = Figure().subplots()
    for style in found.values():
        axes.plot([0, 1], **style)


def test_a_method_has_one_color_in_all_reports():
    pages = (
        ["polynomial-poly_epo", "polynomial-grpo"],
        ["base", "grpo", "poly_epo"],
        ["mine", "grpo_div", "grpo", "max_rl", "poly_epo", "dapo"],
    )
    colors: dict[str, set[str]] = {}
    for labels in pages:
        for label, style in figures.styles(labels).items():
            colors.setdefault(label.rpartition("-")[2], set()).add(style["color"])
            assert style["linestyle"] == "-" or label in ("mine", "max_rl", "dapo", "base")
    assert all(len(found) == 1 for found in colors.values())
    known = [colors[name] for name in ("poly_epo", "grpo", "grpo_div", "max_rl", "dapo", "base")]
    assert all(not first & second for first, second in itertools.combinations(known, 2))


def test_earlier_labels_keep_their_style_when_labels_are_added():
    """The figures of runs contain a part of the labels of a page."""
    labels = ["mine", "grpo", "other", "poly_epo", "polynomial-grpo", "third", "fourth"]
    found = figures.styles(labels)
    assert all(figures.styles(labels[:count]) == dict(list(found.items())[:count]) for count in range(len(labels)))


@pytest.mark.parametrize(
    ("folders", "labels"),
    [
        (("polynomial-poly_epo", "polynomial-grpo"), ["poly_epo", "grpo"]),
        (("polynomial-grpo",), ["grpo"]),
        (("polynomial-grpo", "countdown-poly_epo"), ["polynomial-grpo", "countdown-poly_epo"]),
        (("polynomial-grpo", "polynomial-mine"), ["polynomial-grpo", "polynomial-mine"]),
        (("a/polynomial-grpo", "b/polynomial-grpo"), None),
    ],
)
def test_runs_are_named_as_in_studies_and_evaluations(tmp_path: Path, folders: tuple[str, ...], labels):
    paths = [tmp_path / folder for folder in folders]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        write_fake_run(path, seed=0, num_steps=2)
    assert list(read_folders(paths)[0]) == (labels or [str(path) for path in paths])


def test_swatches_have_the_colors_of_the_figures():
    results = {"metrics": {"pass@1": {"mean": 0.5, "low": 0.4, "high": 0.6}}, "num_problems": 9, "num_generations": 1}
    line_styles = figures.styles(["base", "poly_epo"])
    page = results_tables({"task": dict.fromkeys(line_styles, results)}, line_styles)
    assert page.index("look6") < page.index("look0")  # black for the base policy, blue for Poly-EPO
    assert "95% bootstrap intervals over problems" in page  # results.json of earlier versions does not name them
    named = results | {"intervals": "by another <method>"}
    assert "by another &lt;method&gt;" in results_tables({"task": {"base": named}}, line_styles)


def test_the_first_table_of_a_benchmark_has_few_metrics():
    first, others = ("pass@1", "pass@64", "correct_clusters@64"), ("solved", "answer_entropy", "response_length")
    metrics = {name: {"mean": 0.5, "low": 0.4, "high": 0.6} for name in first + others}
    results = {"metrics": metrics, "num_problems": 9, "num_generations": 64}
    page = results_tables({"task": {"base": results}}, figures.styles(["base"]))
    shown, _, collapsed = page.partition("<details>")
    assert re.findall("<th>(.*?)</th>", shown)[:4] == ["model", "pass@1", "pass@64", "correct clusters@64"]
    assert re.findall("<th>(.*?)</th>", collapsed)[:3] == ["model", "answer entropy", "response length"]


@pytest.mark.parametrize("last", [1, 7, 20, 23, 199, 1000])
def test_the_last_tick_is_the_last_step(last: int):
    for draw in (figures.plot_training_dynamics, figures.plot_comparison):
        figure = draw(panel_runs(last))
        assert figure is not None
        for axes in figure.axes:
            ticks = [int(tick) for tick in axes.get_xticks()]
            assert ticks[-1] == last and ticks == sorted(set(ticks)) and len(ticks) <= 7


def test_fractions_are_drawn_from_0_to_1():
    figure = figures.plot_comparison(panel_runs(3))
    pass_1 = {"metrics": {f"{PASS}@1": {"mean": 0.5}, f"{PASS}@2": {"mean": 0.6}}}
    curve = evaluation_figures.plot_pass_at_k({"task": {"base": pass_1}}, figures.styles(["base"]))
    assert figure is not None and curve is not None
    for axes in (figure.axes[0], curve.axes[0]):
        low, high = axes.get_ylim()
        assert -0.05 < low < 0 and 1 < high < 1.05
        assert [axes.get_yticks()[index] for index in (0, -1)] == [0, 1]


def test_figures_ignore_a_users_settings_and_draw_any_name(tmp_path: Path):
    with matplotlib.rc_context({"text.usetex": True, "savefig.format": "svg", "axes.facecolor": "black"}):
        figure = figures.plot_training_dynamics(panel_runs(5))
        assert figure is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figures.save(figure, tmp_path, "dynamics")
            image = figures.image(figure, "dynamics")
        assert matplotlib.rcParams["text.usetex"]
    assert (tmp_path / "dynamics.png").read_bytes().startswith(b"\x89PNG")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(NAMES)
    assert image.startswith("<div")


@pytest.mark.slow
def test_the_command_ignores_the_backend_of_a_notebook_and_prints_any_name(tmp_path: Path):
    run = write_fake_run(tmp_path / "中文", seed=0, num_steps=2)
    changed = {"MPLBACKEND": "module://not_installed.backend_inline", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "poly_epo_jax.report", str(run)]
    done = subprocess.run(command, env=os.environ | changed, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u4e2d\\u6587/report/report.html" in done.stdout
