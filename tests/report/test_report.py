"""Tests of reports on runs, with generated run folders."""

import base64
import hashlib
import html.parser
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reports

from poly_epo_jax.metrics.logged import describe
from poly_epo_jax.report import (
    __main__ as report_main,
    build as report,
    evaluation_figures,
    figures,
    generations as report_generations,
    page as report_page,
)

HOSTILE = reports.HOSTILE
ROOT = Path(__file__).parents[2]


def write_fake_run(run_dir: Path, seed: int, num_steps: int = 200, gain: float = 1.0, evaluate_every: int = 20) -> Path:
    """Writes the folder of a finished run.

    The reward rises to a plateau. `gain` controls the number of clusters, and `seed` the noise.
    """
    rng = np.random.default_rng(seed)
    metrics, timing = [], []
    for step in range(num_steps + 1):
        progress = 1 - np.exp(-3 * step / max(num_steps, 1))
        row: dict[str, float | None] = {"step": step}
        if evaluate_every and step % evaluate_every == 0:
            accuracy = 0.15 + 0.4 * progress + rng.normal(0, 0.01)
            row["eval/reward"] = accuracy
            row["eval/solved"] = min(1.0, 2 * accuracy)
            row["eval/correct_clusters@8"] = 1.2 + (gain - 0.5) * 2 * progress + rng.normal(0, 0.05)
            row["eval/correct_clusters@64"] = 2.2 + (gain - 0.5) * 5 * progress + rng.normal(0, 0.05)
            row["eval/incorrect_clusters@8"] = 4.0 - 2 * progress
            row |= {f"eval/pass@{k}": 1 - (1 - accuracy) ** (gain * k**0.7) for k in (1, 2, 4, 8, 16, 32, 64)}
        if step > 0:
            row["reward"] = 0.2 + 0.5 * progress + rng.normal(0, 0.05)
            row["solved"] = 0.5 + 0.4 * progress + rng.normal(0, 0.04)
            row["clusters/correct"] = 1.3 + (gain - 0.5) * 2 * progress + rng.normal(0, 0.15)
            row["clusters/incorrect"] = 3.5 - 2 * (1.3 - gain) * progress + rng.normal(0, 0.2)
            row["policy/entropy"] = 0.8 - 0.6 * (1.2 - gain) * progress + rng.normal(0, 0.02)
            row["clusters/synergy"] = 0.02 * gain * progress + rng.normal(0, 0.004)
            row["policy/kl"] = None if step == 3 else 0.001
            row |= {"response/length": 11.9184, "response/truncated": 0.01 * progress, "policy/clip_fraction": 0.0}
            row["policy/gradient_norm"] = 0.3 - 0.1 * progress
            seconds = {"seconds/generate": 12 + rng.normal(), "seconds/update": 5.0, "seconds/step": 18.0}
            timing.append({"step": step, **seconds, "tokens_per_second": 5000 + 100 * rng.normal()})
        metrics.append(row)
    timeline = [{"step": step, "start": 18.0 * (step - 1), **fake_window(step)} for step in range(1, num_steps + 1)]
    generations = [
        {
            "step": step,
            "problem": f"problem-{problem}",
            "prompt": f"Find (x, y) with y = x^2 + {problem} & x < 9.",
            "occurrence": 0,
            "generation": generation,
            "response": HOSTILE if generation == 0 else f"I try x = {cluster}, so y = {cluster**2 + problem}.",
            "reward": float(cluster % 2),
            "correct": cluster % 2 == 1,
            "cluster": None if problem == 1 else cluster,
            "rationale": None if problem == 1 else f"strategy {cluster}: {HOSTILE}",
            "advantage": None if problem == 1 else (cluster % 2 - 0.5) / 7,
        }
        for step in (num_steps // 2, num_steps)
        for problem in range(8)
        for generation, cluster in enumerate([0, 1, 1, 2, 3, 3, 3, 100])
    ]
    run_dir.mkdir(parents=True)
    for name, rows in {"metrics": metrics, "timing": timing, "timeline": timeline, "generations": generations}.items():
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def fake_window(step: int) -> dict[str, Any]:
    """Returns a step of 18 s, or 30 s if evaluated, in which generation of the next batch overlaps with the update."""
    spans = [
        ["generate", 0.0, 8.0, step],
        ["grade", 2.0, 8.5, step],
        ["judge", 2.0, 4.0, step],
        ["judge", 4.5, 9.0, step],
        ["logprobs", 9.0, 9.5, step],
        ["generate", 9.0, 18.0, step + 1],
        ["update", 9.5, 15.0, step],
        ["sync", 16.0, 17.0, step],
    ]
    evaluated = step % 10 == 0
    return {"seconds": 30.0 if evaluated else 18.0, "spans": spans + [["evaluate", 18.0, 30.0, step]] * evaluated}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    runs = tmp_path_factory.mktemp("runs")
    return [write_fake_run(runs / "grpo", seed=0, gain=0.5), write_fake_run(runs / "poly-epo", seed=1, gain=1.0)]


@pytest.fixture(scope="module")
def page(two_runs: list[Path]) -> str:
    assert report_main.main([str(run) for run in two_runs]) == 0
    return (two_runs[0].parent / "report" / "report.html").read_text(encoding="utf-8")


def write_small_run(run_dir: Path) -> Path:
    """Writes the folder of a run with one metric, whose report has a single panel."""
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    return run_dir


@pytest.mark.slow
def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert report_main.main([str(write_small_run(tmp_path / "run")), "--output=~/mine"]) == 0
    assert (tmp_path / "mine" / "report.html").exists()


class Page(html.parser.HTMLParser):
    """Parses tags and text of a page, and verifies that tags are balanced."""

    VOID = frozenset({"meta", "img", "br", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


@pytest.mark.slow
def test_report_does_not_import_jax(two_runs: list[Path], tmp_path: Path):
    evaluation = reports.write_fake_evaluation(tmp_path / "evaluation", {"base": 0.5}, ("x",))
    arguments = [str(two_runs[0]), str(evaluation), "--output", str(tmp_path / "out")]
    code = f"import sys; from poly_epo_jax.report.__main__ import main; print(main({arguments}), 'jax' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "0 False"


@pytest.mark.slow
def test_figures_have_their_sizes_at_150_dpi(two_runs: list[Path], page: str):
    folder = two_runs[0].parent / "report"
    assert png_size(folder / "training_dynamics.png") == (2100, 1320)  # 4 x 3.5 in by 3 x 2.8 + 0.4 in
    assert png_size(folder / "pass_at_k.png") == (975, 667)  # two lines of labels
    assert png_size(folder / "comparison.png") == (1350, 525)


def test_every_figure_is_written_as_pdf(two_runs: list[Path], page: str):
    for name in ("training_dynamics", "pass_at_k", "comparison", "timeline"):
        pdf = (two_runs[0].parent / "report" / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and b"/FontFile2" in pdf and b"/Type3" not in pdf


def test_timeline_summarizes_exclusive_times_of_each_run(page: str):
    assert headings(page) == [
        *("Held-out metrics during training", "Held-out pass@k", "Training dynamics", "Timeline", "Generations"),
        "Final metrics of the runs",
    ]
    for run in ("grpo", "poly-epo"):
        assert (
            f"{run}: A step takes 18 s (median of 200). Generation alone takes 22% of it, judging 3%" in Page(page).text
        )


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_every_drawn_metric_is_shown_and_explained(page: str):
    text, metrics = Page(page).text, {*figures.COMPARED, *figures.drawn_metrics()}
    shown = {metric for metric in metrics if f"{describe(metric).title}: {describe(metric).meaning}" in text}
    not_logged = {"data/with_signal", "episode/turns", "policy/reference_kl", "response/looped", "train/ever_solved"}
    assert metrics - shown == not_logged  # the metrics that these runs do not log


def test_figures_are_images_in_the_page(page: str):
    drawn = svgs(page)
    assert list(drawn) == ["Held-out metrics during training", "Held-out pass@k", "Training dynamics", "Timeline"]
    for text in ("Response length", "Truncated responses", "KL(old policy, current policy)", "Gradient norm"):
        assert f">{text}</text>" in drawn["Training dynamics"]
    assert not any(word in svg for svg in drawn.values() for word in ("<script", "onload", 'href="http', "NaN"))


def svgs(page: str) -> dict[str, str]:
    """Returns the figures of a page by alternative text."""
    tags = [attributes for tag, attributes in Page(page).tags if tag == "img"]
    prefix = "data:image/svg+xml;base64,"
    assert all((attributes["src"] or "").startswith(prefix) for attributes in tags)
    return {
        attributes["alt"] or "": base64.b64decode((attributes["src"] or "").removeprefix(prefix)).decode()
        for attributes in tags
    }


@pytest.mark.parametrize("value", [11.9184, 1e-7, 123456.0])
def test_ticks_of_a_flat_curve_show_its_value(value: float):
    """Tick labels are distinct and equal the full tick values."""
    figure = figures.plot_training_dynamics({"a": [{"step": step, "reward": value} for step in range(1, 50)]})
    assert figure is not None
    (axes,) = figure.axes
    figure.draw_without_rendering()
    assert axes.yaxis.get_offset_text().get_text() == "" or value < 1e-3
    low, high = axes.get_ylim()
    scale = float((axes.yaxis.get_offset_text().get_text() or "1").replace("\N{MINUS SIGN}", "-"))
    shown = [(tick, label.get_text()) for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)]
    inside = [(tick, float(text.replace("\N{MINUS SIGN}", "-"))) for tick, text in shown if low <= tick <= high]
    assert len({text for _, text in inside}) == len(inside) >= 3
    for tick, text in inside:
        assert text * scale == pytest.approx(tick, rel=1e-6)


@pytest.mark.slow
def test_settings_show_differing_keys_and_versions(tmp_path: Path):
    runs = [write_small_run(tmp_path / name) for name in ("a", "b")]
    for seed, run in enumerate(runs):
        config = {"workdir": str(run), "seed": seed, "algo": {"loss": "<cispo>", "options": {}}}
        (run / "config.json").write_text(json.dumps(config))
        used = [{"python": "3.12.3", "jax": "0.10.2"}] + [{"python": "3.12.3", "jax": "0.11.0"}] * seed
        (run / "about.json").write_text(json.dumps({"versions": used}))
    page = report.write_report(runs, tmp_path / "out").read_text()
    assert "<tr><th>run</th><th>seed</th></tr><tr><th>a</th><td>0</td></tr><tr><th>b</th><td>1</td></tr>" in page
    assert "<th>algo.loss</th><td>&lt;cispo&gt;</td>" in page and "<th>workdir</th>" not in page
    assert "Not all steps were trained with the same versions." in page
    assert "<th>all 2 runs</th><td>3.12.3</td><td>0.10.2</td>" in page and "<th>b</th><td>3.12.3</td><td>0.11.0" in page


@pytest.mark.parametrize("spans", [None, [["update", 0.0, 1.0]], [["update", "early", 1.0, 1]], 5])
def test_corrupted_timeline_produces_a_one_line_error(tmp_path: Path, capsys, spans: Any):
    run = write_fake_run(tmp_path / "run", seed=0, num_steps=2, evaluate_every=0)
    (run / "timeline.jsonl").write_text(json.dumps({"step": 7, "start": 0.0, "seconds": 1.0, "spans": spans}) + "\n")
    assert report_main.main([str(run)]) == 2
    assert "timeline.jsonl is corrupted at step 7" in capsys.readouterr().err


def test_page_is_balanced_and_loads_no_external_resources(page: str):
    parsed = Page(page)
    without_data = page.replace(data_of(page, parse=False), "")
    assert "http://" not in without_data and "https://" not in without_data
    assert "url(" not in without_data and "@import" not in without_data
    tags = [tag for tag, _ in parsed.tags]
    assert not {"link", "iframe", "object"} & set(tags)
    assert tags.count("script") == 2  # data and script of the page
    (policy,) = (attributes["content"] for _, attributes in parsed.tags if "http-equiv" in attributes)
    assert policy and policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "; script-src 'sha256-" in policy and "unsafe" not in policy


def test_policy_allows_only_script_and_style_of_the_page(page: str):
    for tag in ("script", "style"):
        text = page[page.index(f"<{tag}>") + len(tag) + 2 : page.rindex(f"</{tag}>")]
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in page[: page.index("<style>")]


def test_hostile_text_is_escaped_in_the_data(page: str):
    assert page.count("<script") == 2 and "<img src" not in page and "<" not in data_of(page, parse=False)
    generation = data_of(page)["collections"][0]["problems"][0]["generations"][0]
    assert generation["response"] == HOSTILE.replace("\x00\x1b", "\\x00\\x1b").replace("\u202e", "\\u202e").replace(
        "\ud800", "?"
    )
    assert generation["rationale"] == f"strategy 0: {generation['response']}"


def data_of(page: str, parse: bool = True) -> Any:
    start = page.index('id="data">') + len('id="data">')
    data = page[start : page.index("</script>", start)]
    return json.loads(data) if parse else data


@pytest.mark.slow
def test_page_names_runs_and_escapes_their_names(tmp_path: Path):
    run = write_fake_run(tmp_path / "<b>&run", seed=0, num_steps=3, evaluate_every=0)
    page = report.write_report([run], tmp_path / "out").read_text()
    assert "&lt;b&gt;&amp;run" in page and "<b>&run" not in page


def test_summary_gives_first_and_last_evaluation():
    rows = [
        {"step": 0, "eval/reward": 0.25, "eval/correct_clusters@8": 1.5},
        {"step": 1, "reward": 0.9},
        {"step": 2, "reward": 0.9, "eval/reward": 0.5, "eval/correct_clusters@8": 3.0},
        {"step": 3, "reward": 0.9},
    ]
    assert report_page.run_summary("a", rows) == (
        "<b>a</b>: Held-out reward: 0.250 → 0.500, Held-out correct clusters@8: 1.50 → 3.00, from step 0 to step 2."
    )
    assert report_page.run_summary("a", rows[1:2]) == "<b>a</b>: not evaluated up to step 1."


def test_final_values_average_training_but_not_evaluation():
    rows = [{"step": step, "reward": float(step), "eval/reward": float(step), "kl": None} for step in range(1, 21)]
    assert report_page.final_values(rows) == {"reward": 15.5, "eval/reward": 20.0}  # mean of 11 to 20


def test_table_sorts_pass_at_k_by_number(page: str):
    text = Page(page).text
    positions = [text.index(f"eval/pass@{k}") for k in (1, 2, 4, 8, 16, 32, 64)]
    assert positions == sorted(positions)


def test_generations_are_from_the_first_and_last_logged_steps(page: str):
    collections = data_of(page)["collections"]
    assert [(one["model"], one["part"]) for one in collections] == [
        (run, step) for run in ("grpo", "poly-epo") for step in ("step 200", "step 100")
    ]
    first, second = collections[0]["problems"][:2]
    assert (first["id"], first["size"], first["correct"]) == ("problem-0", 8, 5)
    assert [(cluster["id"], cluster["size"]) for cluster in first["clusters"]] == [
        (3, 3),
        (1, 2),
        (0, 1),
        (2, 1),
        (100, 1),
    ]
    assert first["generations"][1]["advantage"] == pytest.approx(0.5 / 7)
    assert second["clusters"] == [{"id": None, "size": 8, "correct": 5}]
    assert "rationale" not in second["generations"][0]


def test_repeated_problem_of_a_step_is_shown_separately(tmp_path: Path):
    """Cluster ids are only comparable among responses that were judged together."""
    run = write_fake_run(tmp_path / "run", seed=0, num_steps=2, evaluate_every=0)
    rows = [json.loads(line) for line in (run / "generations.jsonl").read_text().splitlines()[:8]]
    rows += [row | {"occurrence": 1, "cluster": 3} for row in rows]
    (run / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (collection,) = report_generations.run_collections("run", run)
    first, again = collection["problems"]
    assert (collection["all_problems"], collection["all_generations"]) == (2, 16)
    assert [(one["id"].head, one["size"], len(one["clusters"])) for one in (first, again)] == [
        ("problem-0", 8, 5),
        ("problem-0 (2)", 8, 1),
    ]


def test_only_first_and_last_of_many_steps_are_kept(tmp_path: Path):
    run = write_fake_run(tmp_path / "run", seed=0, num_steps=2, evaluate_every=0)
    rows = (run / "generations.jsonl").read_text().splitlines(keepends=True)
    many = [json.dumps(json.loads(row) | {"step": step}) + "\n" for step in (5, 6, 7) for row in rows[:8]]
    (run / "generations.jsonl").write_text("".join(many) + '{"step": 8, "half')
    assert [one["part"] for one in report_generations.run_collections("run", run)] == ["step 7", "step 5"]


@pytest.mark.slow
def test_default_output_is_in_a_single_run_or_next_to_several(two_runs: list[Path], page: str, tmp_path: Path, capsys):
    run = write_small_run(tmp_path / "run")
    assert report_main.main([str(run)]) == 0
    expected = run / "report" / "report.html"
    assert expected.exists()
    assert capsys.readouterr().out == f"report: {expected}\n"
    assert (two_runs[0].parent / "report" / "report.html").exists()


@pytest.mark.slow
def test_runs_with_equal_names_are_labeled_by_path(tmp_path: Path):
    runs = [write_small_run(tmp_path / method / "seed0") for method in ("a", "b")]
    page = report.write_report(runs, tmp_path / "out").read_text()
    assert all(str(run) in page for run in runs)


@pytest.mark.slow
def test_run_in_progress_with_a_partial_row_and_no_evaluation(tmp_path: Path):
    run = write_fake_run(tmp_path / "young", seed=0, num_steps=2, evaluate_every=0)
    (run / "generations.jsonl").unlink()
    (run / "timeline.jsonl").unlink()  # not written by older versions
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    page = report.write_report([run], tmp_path / "out").read_text()
    assert "young</b>: not evaluated up to step 2." in page
    assert data_of(page)["collections"] == []
    assert headings(page) == ["Training dynamics", "Generations", "Final metrics of the runs"]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["report.html", "training_dynamics.pdf", "training_dynamics.png"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda run: None, "is not a folder"),
        (lambda run: run.mkdir(), "metrics.jsonl"),
        (lambda run: (run.mkdir(), (run / "metrics.jsonl").write_text("")), "metrics.jsonl"),
        (lambda run: (run.mkdir(), (run / "metrics.jsonl").write_text("nonsense\n")), "line 1"),
    ],
)
def test_missing_runs_produce_a_one_line_error_and_exit_code_2(tmp_path: Path, capsys, make, sentence: str):
    run = tmp_path / "run"
    make(run)
    assert report_main.main([str(run)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and str(run) in captured.err and sentence in captured.err
    assert not (run / "report").exists()


def test_an_output_folder_that_cannot_be_created_is_reported(tmp_path: Path, capsys):
    run, output = write_small_run(tmp_path / "run"), tmp_path / "file" / "report"
    output.parent.write_text("")
    assert report_main.main([str(run), "--output", str(output)]) == 2
    assert f"{output} cannot be created (Not a directory); choose another --output." in capsys.readouterr().err


def test_missing_arguments_produce_exit_code_2(capsys):
    with pytest.raises(SystemExit) as exit:
        report_main.main([])
    assert exit.value.code == 2
    assert "FOLDER" in capsys.readouterr().err


def test_panels_exist_only_for_logged_metrics():
    runs = {"a": [{"step": 1, "reward": 0.5, "clusters/synergy": None}], "b": [{"step": 1, "solved": 0.5}]}
    figure = figures.plot_training_dynamics(runs)
    assert figure is not None
    assert [axes.get_title("left") for axes in figure.axes] == ["Training reward", "Solved prompts"]
    assert figures.plot_training_dynamics({"a": [{"step": 1, "policy/ratio": 0.5}]}) is None
    assert evaluation_figures.plot_held_out_pass_at_k(runs) is None
    assert figures.plot_comparison(runs) is None


def test_runs_have_the_same_colors_in_all_figures_and_legends():
    runs = {f"run{i}": [{"step": 0, "eval/reward": 0.1, "eval/pass@1": 0.1, "eval/pass@2": 0.2}] for i in range(9)}
    drawn = [figures.plot_comparison(runs), evaluation_figures.plot_held_out_pass_at_k(runs)]
    line_styles = []
    for figure in drawn:
        assert figure is not None
        assert [text.get_text() for text in figure.legends[0].get_texts()] == list(runs)
        line_styles.append([(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines])
    assert line_styles[0] == line_styles[1]
    assert len(set(line_styles[0])) == 9


def test_pass_at_k_is_from_the_last_evaluation_sorted_by_k():
    rows = [
        {"step": 0, "eval/pass@1": 0.1, "eval/pass@2": 0.2},
        {"step": 5, "eval/pass@1": 0.3, "eval/pass@16": 0.9, "eval/pass@2": 0.5, "eval/pass@32": None},
        {"step": 6, "reward": 0.1},
    ]
    points = evaluation_figures.curve(evaluation_figures.last_evaluation(rows), "pass")
    assert [(k, point.mean) for k, point in points.items()] == [(1, 0.3), (2, 0.5), (16, 0.9)]
    assert evaluation_figures.last_evaluation(rows[2:]) == {"metrics": {}}


def test_held_out_pass_at_k_includes_each_base_policy_once_and_ends_before_the_largest_k():
    def rows(*values):
        return [{"step": 5 * i, "eval/pass@1": value, "eval/pass@2": 2 * value} for i, value in enumerate(values)]

    for runs, expected in (
        ({"a": rows(0.1, 0.2), "b": rows(0.1, 0.3)}, {"a": 0.2, "b": 0.3, "base": 0.1}),
        ({"a": rows(0.1, 0.2), "b": rows(0.2, 0.3)}, {"a": 0.2, "b": 0.3, "base of a": 0.1, "base of b": 0.2}),
    ):
        figure = evaluation_figures.plot_held_out_pass_at_k(runs)
        assert figure is not None
        drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in figure.axes[0].lines}
        assert drawn == {label: [[1, value]] for label, value in expected.items()}


@pytest.mark.parametrize("length", [1, 2, 13, 14, 200])
def test_smooth_is_a_normalized_gaussian_mean(length: int):
    values = np.random.default_rng(length).normal(size=length)
    expected = []
    for center in range(length):
        near = [i for i in range(length) if abs(i - center) <= 3 * length // 40]
        weights = [np.exp(-0.5 * ((i - center) / (length / 40)) ** 2) for i in near]
        expected.append(sum(w * values[i] for w, i in zip(weights, near, strict=True)) / sum(weights))
    np.testing.assert_allclose(figures.smooth(values), expected, rtol=1e-12, atol=0)
    np.testing.assert_allclose(figures.smooth(np.full(length, 0.3)), 0.3, rtol=1e-12, atol=0)


def test_audits_show_inflation_failures_and_the_prompts_with_most_disagreement(tmp_path: Path):
    run = write_fake_run(tmp_path / "run", seed=0, num_steps=40)
    probes = dict.fromkeys(("repetition", "order", "paraphrase", "announcement", "padding"), 0.0)
    rewards = {"rewards": [0.0, 1.0] * 4}
    rows = [
        {"step": step, "group": f"step {step}, problem-{problem}", "probes": probes, "failures": {}, **rewards}
        | {"clusters": [0, 1, 1, 2, 3, 3, 3, 100], "auditor": [0, 1, 1, 0, 3, 3, 3, 100] if problem else [0] * 8}
        for step in (20, 40)
        for problem in (0, 2, 3)
    ]
    failed = {"auditor": None, "failures": {"auditor": f"unreachable: {HOSTILE}"}}
    rows.append(rows[0] | {"group": "step 20, problem-5"} | failed)
    (run / "audit.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report.write_report([run], tmp_path / "report").read_text()
    assert "Audit of the judge" in page and "1 requests of audits failed" in page and "<script>alert" not in page
    # Clusters: 4 of the judge, and 1, 3 and 3 of the auditor.
    assert f"<th>inflation</th><td>{12 / 7:.3f}" in page
    prompts = dict(re.findall(r"<th>(inflation|order)</th><td>.*?</td><td>(\d+)</td>", page))
    assert prompts == {"inflation": "6", "order": "7"}
    assert page.index("Disagreement: step 20, problem-0") < page.index("Disagreement: step 20, problem-2")
    assert (tmp_path / "report" / "audit.png").exists()
