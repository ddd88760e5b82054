"""The comparison of finished runs: means and ranges over seeds, by method (first run first) and learning rate."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from poly_epo_jax.report import frontier


def write_run(folder: Path, method: str, rate: float, reward: float, clusters: float) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"optimizer": {"learning_rate": rate}}))
    (folder / "about.json").write_text(json.dumps({"method": method}))
    last = {metric: 1.0 for metric in frontier.COLUMNS} | {"eval/reward": reward, "eval/correct_clusters@8": clusters}
    rows = [{"step": 0} | dict.fromkeys(frontier.COLUMNS, 0.0), {"step": 5} | last, {"step": 6, "reward": 0.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_table_and_figure_of_the_last_evaluations(tmp_path: Path):
    runs = [
        write_run(tmp_path / "b", "Poly-EPO", 1e-3, 0.5, 6.0),
        write_run(tmp_path / "a", "My estimator", 1e-3, 0.9, 1.0),
        write_run(tmp_path / "c", "Poly-EPO", 1e-3, 0.7, 6.5),
        write_run(tmp_path / "d", "Poly-EPO", 1e-4, 0.25, 5.0),
    ]
    assert frontier.main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0
    rows = (tmp_path / "out" / "frontier.md").read_text().splitlines()[2:]
    assert rows == [
        "| Poly-EPO | 0.0001 | 1 | 0.25 | 5 | 1 | 1 | 1 |",
        "| Poly-EPO | 0.001 | 2 | 0.6 (0.5 to 0.7) | 6.25 (6 to 6.5) | 1 | 1 | 1 |",
        "| My estimator | 0.001 | 1 | 0.9 | 1 | 1 | 1 | 1 |",
    ]
    assert imread(tmp_path / "out" / "frontier.png").std() > 0.01


def test_a_run_without_evaluation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "a", "GRPO", 1e-3, 0.9, 1.0)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert frontier.main([str(run)]) == 2
    assert "a has no evaluation with 8 or more generations; set eval.every" in capsys.readouterr().err


def test_what_needs_more_generations_than_a_run_was_evaluated_with_is_left_blank():
    row = dict.fromkeys(frontier.COLUMNS, 1.0)
    less = {metric: value for metric, value in row.items() if not metric.endswith("@64")}
    rows = frontier.table({("GRPO", 1e-3): [row, less]}).splitlines()
    assert rows[-1] == "| GRPO | 0.001 | 2 | 1 | 1 | - | 1 | 1 |"


@pytest.mark.parametrize("about", [None, "{}", "[]", "nonsense"])
def test_a_run_that_does_not_name_its_method_is_refused(tmp_path: Path, capsys, about: str | None):
    run = write_run(tmp_path / "old", "GRPO", 1e-3, 0.9, 1.0)
    (run / "about.json").unlink()
    if about is not None:
        (run / "about.json").write_text(about)
    assert frontier.main([str(run)]) == 2
    expected = (
        f'{run / "about.json"} does not name the method of the run; write one there, such as {{"method": "Poly-EPO"}}.'
    )
    assert capsys.readouterr().err == f"Error: {expected}\n"
