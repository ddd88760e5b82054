"""Tests of reports on evaluations: figures, tables, shown generations, and rejected input."""

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.figure import Figure
from reports import write_fake_evaluation
from test_report import Page, data_of, svgs, write_small_run

from poly_epo_jax.evaluate.results import compute_results
from poly_epo_jax.metrics.evaluation import EVALUATION_METRICS
from poly_epo_jax.metrics.intervals import difference_interval
from poly_epo_jax.report import (
    __main__ as report_main,
    build as report,
    evaluation_figures,
    figures,
    generations as report_generations,
    page as report_page,
)
from poly_epo_jax.report.evaluation_figures import paired_differences, plot_pass_at_k, plot_with_differences
from poly_epo_jax.report.figures import image
from poly_epo_jax.report.folders import read_folders
from poly_epo_jax.report.generations import DEFAULT_BOUNDS, Bounds, TextExcerpt
from poly_epo_jax.report.rollout_trees import CORRECT, INCORRECT, draw_tree, plot_rollout_trees

MODELS = {"base": 0.2, "grpo": 0.4, "poly_epo": 0.5}
FIGURES = ("evaluation_pass_at_k", "majority", "branches", "rollout_trees")


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_evaluation(tmp_path_factory.mktemp("reports") / "evaluation", MODELS)


@pytest.fixture(scope="module")
def page(evaluation: Path) -> str:
    assert report_main.main([str(evaluation)]) == 0
    return (evaluation / "report" / "report.html").read_text(encoding="utf-8")


def results_of(evaluation: Path) -> dict[str, dict[str, Any]]:
    return {
        benchmark.name: {
            model.name: json.loads((model / "results.json").read_text()) for model in sorted(benchmark.iterdir())
        }
        for benchmark in sorted(evaluation.iterdir())
        if benchmark.name != "report"
    }


@pytest.mark.slow
def test_every_figure_is_written_as_png_and_pdf(evaluation: Path, page: str):
    written = {path.name for path in (evaluation / "report").iterdir()}
    assert written == {f"{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")} | {"report.html"}


@pytest.mark.slow
def test_report_is_deterministic(evaluation: Path, page: str, tmp_path: Path):
    report.write_report([evaluation], tmp_path)
    for name in ("majority.png", "majority.pdf", "report.html"):
        assert (tmp_path / name).read_bytes() == (evaluation / "report" / name).read_bytes()


@pytest.mark.parametrize("draw", [plot_pass_at_k, evaluation_figures.plot_majority, evaluation_figures.plot_branches])
def test_models_have_the_same_color_in_all_benchmark_panels(evaluation: Path, draw):
    line_styles = figures.styles(["some run", *MODELS])
    figure = draw(results_of(evaluation), line_styles)
    assert [axes.get_title("left") for axes in figure.axes] == ["aime26", "minerva"]
    for axes in figure.axes:
        assert [line.get_color() for line in axes.lines] == [line_styles[model]["color"] for model in MODELS]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(MODELS)
    assert draw({}, line_styles) is None


def test_pass_at_k_figure_shows_means_and_intervals(evaluation: Path):
    results = results_of(evaluation)
    figure = plot_pass_at_k(results, figures.styles(list(MODELS)))
    assert figure is not None
    metrics = results["aime26"]["grpo"]["metrics"]
    heights = np.array(figure.axes[0].lines[1].get_ydata())
    np.testing.assert_allclose(heights, [metrics[f"pass@{k}"]["mean"] for k in range(1, 9)])
    band = figure.axes[0].collections[1].get_paths()[0].vertices
    assert {metrics["pass@4"]["low"], metrics["pass@4"]["high"]} <= set(np.asarray(band)[:, 1])
    assert figure.axes[0].get_xscale() == "log"
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["1", "2", "4", "8"]


def test_paired_differences_are_means_over_the_same_problems(evaluation: Path):
    """Compares differences with brute force over subsets, and intervals with those of the differences by problem."""
    results = results_of(evaluation)
    for benchmark, models in paired_differences(results).items():
        first = results[benchmark]["base"]
        assert list(models) == ["grpo", "poly_epo"]
        for model, found in models.items():
            for k, point in evaluation_figures.curve(found, "pass").items():
                values = [
                    solved_by_a_subset(ours, k) - solved_by_a_subset(theirs, k)
                    for ours, theirs in zip(results[benchmark][model]["per_problem"], first["per_problem"], strict=True)
                ]
                low, high = difference_interval(np.array(values))
                assert [point.mean, point.low, point.high] == pytest.approx(
                    [np.mean(values), float(low), float(high)], abs=1e-9
                )
    # Two models that solve all problems can differ on others.
    solved = {"per_problem": [{"problem": i, "num_correct": 2, "num_generations": 2} for i in range(20)]}
    for low, mean, high in (
        (entry["low"], entry["mean"], entry["high"])
        for entry in paired_differences({"b": {"one": solved, "two": solved}})["b"]["two"]["metrics"].values()
    ):
        assert low < -0.1 < mean == 0 < 0.1 < high
    assert paired_differences({}) == {}
    assert paired_differences({"aime26": {"base": results["aime26"]["base"]}}) == {}


def test_pass_at_k_is_drawn_beside_its_differences_from_the_first_model(evaluation: Path):
    results = results_of(evaluation)
    line_styles = figures.styles(list(MODELS))
    figure = plot_with_differences(results, line_styles)
    assert figure is not None
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["aime26: pass@k", "pass@k minus that of base", "minerva: pass@k", "pass@k minus that of base"]
    *others, zero = figure.axes[1].lines
    assert [line.get_label() for line in others] == ["grpo", "poly_epo"]
    assert zero.get_color() == line_styles["base"]["color"] == "#000000"
    points = evaluation_figures.curve(paired_differences(results)["aime26"]["grpo"], "pass")
    np.testing.assert_allclose(np.array(others[0].get_ydata()), [point.mean for point in points.values()])
    alone = {benchmark: {"grpo": models["grpo"]} for benchmark, models in results.items()}
    figure = plot_with_differences(alone, line_styles)
    assert figure is not None and len(figure.axes) == 2
    assert plot_with_differences({}, line_styles) is None


def solved_by_a_subset(row: dict[str, Any], k: int) -> float:
    """Returns the fraction of the subsets of k generations that contain a correct one."""
    correct = [True] * row["num_correct"] + [False] * (row["num_generations"] - row["num_correct"])
    return float(np.mean([any(subset) for subset in itertools.combinations(correct, k)]))


def test_figures_without_intervals():
    estimate = {"mean": 0.5, "low": None, "high": None}
    results = {"metrics": {"pass@1": estimate, "pass@2": estimate}, "branching": {"mean": []}}
    for k, (mean, *bounds) in evaluation_figures.curve(results, "pass").items():
        assert k in (1, 2) and mean == 0.5 and np.isnan(bounds).all()
    line_styles = figures.styles(["a"])
    assert plot_pass_at_k({"b": {"a": results}}, line_styles) is not None
    assert evaluation_figures.plot_branches({"b": {"a": results}}, line_styles) is not None


def test_tree_by_hand():
    token_ids = [np.array(ids) for ids in ([1, 2, 3], [1, 2, 4, 5], [9], [1, 2, 3])]
    axes = Figure().subplots()
    draw_tree(axes, list(zip(token_ids, [True, False, False, True], strict=True)))
    drawn = [(*np.asarray(line.get_xydata()).tolist(), line.get_linewidth(), line.get_marker()) for line in axes.lines]
    edges = {(*path[0], *path[2], width) for *path, width, _ in drawn if len(path) == 3}
    widths = {size: 0.9 + 0.5 * np.log2(size) for size in (1, 2, 3)}
    assert edges == {
        (0, 1.5, 2, 1.0, widths[3]),  # start, row of the parent, end, row
        (2, 1.0, 3, 0.5, widths[2]),
        (2, 1.0, 4, 2.0, widths[1]),
        (0, 1.5, 1, 3.0, widths[1]),
    }
    ends = [path for *path, _, _ in drawn if len(path) == 2]
    assert ends == [[[3, 0.5], [3, 0]], [[3, 0.5], [3, 1]], [[4, 2.0], [4, 2]], [[1, 3.0], [1, 3]]]
    marks = [(*path[0], marker) for *path, _, marker in drawn if len(path) == 1]
    assert marks == [(3, 0, "o"), (3, 1, "o"), (4, 2, "X"), (1, 3, "X")]


def test_tree_figure_distinguishes_correct_and_incorrect_leaves(evaluation: Path):
    rollouts = [(np.array([1]), True), (np.array([2, 3]), False)]
    figure = plot_rollout_trees("a problem", {"grpo": rollouts}, figures.styles(["grpo"]))
    assert figure is not None
    marked = [line for line in figure.axes[0].lines if line.get_marker() in ("o", "X")]
    colors = [matplotlib.colors.to_hex(line.get_color()) for line in marked]
    assert [color.upper() for color in colors] == [CORRECT["color"], INCORRECT["color"]]


def test_trees_show_a_problem_that_the_first_model_solves_partially(page: str):
    drawn = svgs(page)["Rollout trees"]
    assert "First 12 generations of problem-2," in drawn
    assert all(f">{model}</text>" in drawn for model in ("base", "grpo")) and ">poly_epo</text>" not in drawn


def test_figure_size_is_limited_for_long_curves(evaluation: Path):
    results = results_of(evaluation)["aime26"]["grpo"] | {"branching": {"mean": list(np.arange(4096.0))}}
    figure = evaluation_figures.plot_branches({"aime26": {"grpo": results}}, figures.styles(["grpo"]))
    assert figure is not None and len(image(figure, "Branching")) < 60_000


def test_tables_have_a_row_per_model_with_intervals(evaluation: Path, page: str):
    text = Page(page).text
    assert "6 problems, 8 generations each" in text
    for column in (
        "pass@1",
        "pass@8",
        "majority@8 accuracy",
        "majority@8 vote share",
        "correct clusters@8",
        "response length",
    ):
        assert text.count(column) >= 2
    value = results_of(evaluation)["aime26"]["grpo"]["metrics"]["pass@8"]
    assert f"{value['mean']:.3f}[{value['low']:.3f}, {value['high']:.3f}]" in text


def test_summary_compares_each_model_with_the_first():
    def results(pass_1: float, pass_4: float, clusters: float) -> dict[str, Any]:
        means = {"pass@1": pass_1, "pass@2": 0.0, "pass@4": pass_4, "correct_clusters@4": clusters}
        return {"metrics": {name: {"mean": mean} for name, mean in means.items()}}

    base, new = results(0.1, 0.2, 1.0), results(0.3, 0.6, 2.0)
    assert report_page.evaluation_summaries({"x": {"base": base, "<new>": new}}) == [
        "<b>&lt;new&gt;</b> instead of base: pass@1: 0.100 → 0.300, pass@4: 0.200 → 0.600, "
        "correct clusters@4: 1.00 → 2.00, on x."
    ]
    (two,) = report_page.evaluation_summaries({"x": {"base": base, "new": new}, "y": {"base": new, "new": new}})
    assert "pass@1: 0.200 → 0.300" in two and two.endswith("means over 2 benchmarks.")
    (single,) = report_page.evaluation_summaries({"x": {"base": base}})
    assert single.startswith("<b>base</b>: pass@1: 0.100, pass@4: 0.200,")
    (apart,) = report_page.evaluation_summaries({"x": {"base": base}, "y": {"new": new}})
    assert apart == "<b>new</b> instead of base: no shared benchmark with the same settings."


@pytest.mark.parametrize(
    "changes", [{"digests": {"problems": "b"}}, {"sampling": {"temperature": 0.2}}, {"digests": {"grader": "2"}}]
)
def test_evaluations_with_other_problems_or_settings_are_not_compared(changes: dict[str, Any]):
    def results(rate: float, **changed: Any) -> dict[str, Any]:
        settings = {"digests": {"problems": "a", "weights": f"{rate}"}, "sampling": {"temperature": 1.0, "seed": 0}}
        rows = [{"problem": f"{index}", "num_correct": int(4 * rate), "num_generations": 4} for index in range(5)]
        metrics = {"metrics": {"pass@1": {"mean": rate}}, "per_problem": rows, "num_problems": 5, "num_generations": 4}
        return metrics | {name: value | changed.get(name, {}) for name, value in settings.items()}

    styles = figures.styles(["base", "new"])
    evaluations = {"x": {"base": results(0.25), "new": results(0.75, sampling={"seed": 1})}}
    assert "0.250 → 0.750" in report_page.evaluation_summaries(evaluations)[0]
    assert evaluation_figures.paired_differences(evaluations)["x"]["new"]["metrics"]["pass@1"]["mean"] == 0.5
    assert "Not all models" not in report_page.results_tables(evaluations, styles)
    evaluations["x"]["new"] = results(0.75, **changes)
    assert "→" not in report_page.evaluation_summaries(evaluations)[0]
    assert not evaluation_figures.paired_differences(evaluations)
    assert "Not all models were evaluated on the same problems" in report_page.results_tables(evaluations, styles)


def test_the_label_of_a_model_is_the_same_on_all_benchmarks(tmp_path: Path):
    """Both folders have a model `m`: the same on `z`, and different ones on `x` and `y`."""
    for folder, benchmark, weights in (("a", "x", "1"), ("b", "x", "2"), ("b", "y", "2"), ("c", "z", "1")):
        written = {"metrics": {}, "branching": {"mean": []}, "num_problems": 0, "num_generations": 0, "per_problem": []}
        path = tmp_path / folder / benchmark / "m" / "results.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(written | {"digests": {"weights": weights}}))
    folders = [tmp_path / name for name in "abc"]
    other = f"m ({tmp_path / 'b'})"
    labels = {benchmark: list(models) for benchmark, models in read_folders(folders)[1].items()}
    assert labels == {"x": ["m", other], "y": [other], "z": ["m"]}


@pytest.mark.slow
def test_hostile_names_are_escaped(tmp_path: Path):
    write_fake_evaluation(tmp_path / "e", {"<img src=x>": 0.5, "&b": 0.5}, ("<script>alert(1)",))
    page = report.write_report([tmp_path / "e"], tmp_path / "out").read_text(encoding="utf-8")
    assert page.count("<script") == 2 and "<img src" not in page
    assert not any("<img" in svg or "<script" in svg for svg in svgs(page).values())
    assert "<script>alert(1)" in Page(page).text and "&b instead of" not in page


@pytest.mark.slow
def test_models_can_be_selected_and_ordered(tmp_path: Path, capsys):
    evaluation, output = write_fake_evaluation(tmp_path / "evaluation", MODELS, ("x",)), tmp_path / "out"
    assert report_main.main([str(evaluation), "--models=poly_epo,base", "--output", str(output)]) == 0
    drawn = svgs((output / "report.html").read_text())["pass@k"]
    assert drawn.index(">poly_epo</text>") < drawn.index(">base</text>") and ">grpo</text>" not in drawn
    assert report_main.main([str(evaluation), "--models=qwen", "--output", str(output)]) == 2
    assert "'qwen' has not been evaluated; choose from base, grpo, poly_epo." in capsys.readouterr().err


@pytest.mark.slow
def test_runs_and_evaluations_share_a_page(evaluation: Path, tmp_path: Path):
    run = write_small_run(tmp_path / "grpo")
    other = write_fake_evaluation(tmp_path / "other", {"base": 0.3}, ("minerva",), clustered=False)
    page = report.write_report([run, evaluation, other], tmp_path / "out").read_text(encoding="utf-8")
    drawn = svgs(page)
    assert {"pass@k", "Training dynamics"} <= set(drawn)
    assert all(f">{label}</text>" in drawn["pass@k"] for label in ("grpo", "base", "poly_epo", f"base ({other})"))


def test_generations_of_a_problem_are_sorted(page: str):
    first = data_of(page)["collections"][0]
    assert (first["model"], first["part"]) == ("base", "aime26")
    assert (first["all_problems"], first["all_generations"]) == (6, 48)
    problem = first["problems"][2]
    assert problem | {"generations": [], "clusters": []} == {
        "id": "problem-2",
        "prompt": "Find x & y with x < 2. <b>Think</b>.",
        "gold": "2",
        "size": 8,
        "correct": 4,
        "clusters": [],
        "generations": [],
    }
    assert [generation["number"] for generation in problem["generations"]] == list(range(8))
    assert problem["generations"][3]["cut"] and problem["generations"][3]["tokens"] == 40
    sizes = {cluster["id"]: (cluster["size"], cluster["correct"]) for cluster in problem["clusters"]}
    assert sizes == {0: (3, 2), 1: (3, 1), 2: (1, 1), 100: (1, 0)}


def test_excerpts_contain_the_number_of_omitted_characters():
    text = "a" * 5000 + "b" * 5000
    assert TextExcerpt.of(text).within(900) == "a" * 600 + "\n[… 9,100 characters omitted …]\n" + "b" * 300
    assert TextExcerpt.of("abc").within(3) == "abc"
    assert TextExcerpt.of("abcdef").within(3) == "ab\n[… 3 characters omitted …]\nf"


def test_bounds_depend_on_the_number_of_generations(tmp_path: Path):
    write_fake_evaluation(tmp_path, {"a": 0.5}, ("x",), num_problems=30, num_generations=20, num_tokens=3000)
    collection, _ = report_generations.evaluation_collection("a", "x", tmp_path / "x" / "a", None, 0)
    assert collection is not None
    (whole,), bounds = report_generations.bound([collection], 100_000_000)
    assert bounds == DEFAULT_BOUNDS and len(whole["problems"]) == 20 and len(whole["problems"][0]["generations"]) == 16
    assert whole["problems"][0]["size"] == 20 and whole["all_generations"] == 600
    for max_bytes, expected in ((500_000, Bounds(20, 8, 1500)), (50_000, Bounds(10, 4, 500))):
        (cut,), bounds = report_generations.bound([collection], max_bytes)
        assert bounds == expected
        assert len(json.dumps(cut).encode()) <= max_bytes and len(cut["problems"]) == expected.problems
        assert all(len(problem["generations"]) == expected.generations for problem in cut["problems"])
    (nothing,), _ = report_generations.bound([collection], 500)
    assert nothing["problems"] == []


@pytest.mark.slow
def test_an_evaluation_is_read_row_by_row(tmp_path: Path):
    write_fake_evaluation(tmp_path, {"a": 0.5}, ("x",), num_problems=40, num_generations=10, num_tokens=2000)
    path = tmp_path / "x" / "a"
    assert (path / "generations.jsonl").stat().st_size > 5_000_000
    tracemalloc.start()
    report_generations.evaluation_collection("a", "x", path, None, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.slow
def test_computed_results_can_be_read(tmp_path: Path):
    folder = write_fake_evaluation(tmp_path / "e", {"a": 0.5}, ("x",)) / "x" / "a"
    (folder / "results.json").write_text(json.dumps(compute_results(folder)))
    page = report.write_report([tmp_path / "e"], tmp_path / "out").read_text(encoding="utf-8")
    assert list(svgs(page)) == ["pass@k", "Majority voting", "Branching", "Rollout trees"]
    shown = [metric for metric in EVALUATION_METRICS.values() if "report" in metric.tables]
    for metric in shown:  # All rewards are 0 or 1.
        assert (metric.title.format(k=8) in page) == ("graded_rewards" not in metric.parameters), metric.title


def test_no_generations_browser_without_generations(tmp_path: Path):
    write_fake_evaluation(tmp_path / "e", {"a": 0.5}, ("x",))
    (tmp_path / "e" / "x" / "a" / "generations.jsonl").unlink()
    page = report.write_report([tmp_path / "e"], tmp_path / "out").read_text(encoding="utf-8")
    assert data_of(page)["collections"] == []
    assert list(svgs(page)) == ["pass@k", "Majority voting", "Branching"]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda folder: _append(folder / "generations.jsonl", "nonsense\n"),
            "generations.jsonl, line 49",
        ),
        (lambda folder: _append(folder / "generations.jsonl", '{"problem": 3}\n'), "line 49"),
        (lambda folder: _append(folder / "generations.jsonl", "[" * 100_000 + "\n"), "line 49"),
        (lambda folder: _append(folder / "generations.jsonl", b"\xff\n"), "line 49"),
        (lambda folder: _append(folder / "results.json", "x"), "results.json"),
        (lambda folder: (folder / "results.json").write_text("[]"), "results.json"),
        (lambda folder: (folder / "results.json").write_text("{}"), "results.json"),
    ],
)
def test_corrupted_files_produce_a_one_line_error_and_exit_code_2(tmp_path: Path, capsys, damage, sentence: str):
    folder = write_fake_evaluation(tmp_path / "e", {"a": 0.5}, ("x",))
    damage(folder / "x" / "a")
    assert report_main.main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and sentence in captured.err
    assert not (folder / "report").exists()


def _append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)
