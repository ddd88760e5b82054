"""Tests of the progress display of studies: active runs on a terminal, and a line per event elsewhere."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from test_study_queue import FakeRun

from poly_epo_jax.study.progress import StudyProgress

ROW = {"run": "task/a-lr0.001-seed0", "stage": "train", "started": "", "seconds": 61.2, "exit": 0, "error": ""}


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=120, color_system=None), file


def test_terminal_shows_the_progress_of_active_runs(tmp_path: Path):
    runs = [FakeRun(tmp_path / name) for name in "ab"]
    (runs[0].folder / "config.json").write_text(json.dumps({"train": {"num_steps": 6}, "eval": {"every": 2}}))
    (runs[0].folder / "metrics.jsonl").write_text('{"step": 4}\n')
    screen, file = console(terminal=True)
    show = StudyProgress(runs, 0, screen)
    for run in runs:
        show.listener.started(run, "train")
    screen.print(show)
    shown = file.getvalue()
    assert "task/a-lr0.001-seed0" in shown and "step 4 of 6" in shown and "not started" in shown
    assert "0 of 2 runs finished" in shown

    show.listener.ended(runs[0], ROW)
    show.listener.ended(runs[1], ROW | {"exit": 1, "error": "no [room]: make some."})
    file.truncate(0)
    screen.print(show)
    assert "step" not in file.getvalue() and "1 of 2 runs finished, 1 failed" in file.getvalue()


def test_each_event_is_a_line_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = FakeRun(tmp_path / "a")
    screen, file = console(terminal=False)
    show = StudyProgress([run], 0, screen)
    show.listener.started(run, "train")
    assert capsys.readouterr().out == "task/a-lr0.001-seed0: train\n"
    show.listener.ended(run, ROW | {"exit": 1, "error": "no [room]: make some."})
    show.listener.ended(run, ROW | {"exit": 143, "error": "SIGTERM: Saved after step 3"})
    show.listener.ended(run, ROW)
    assert file.getvalue().splitlines() == [
        "task/a-lr0.001-seed0: train failed after 0:01:01: no [room]: make some.  (0 of 1 runs finished, 1 failed)",
        "task/a-lr0.001-seed0: train was stopped after 0:01:01: SIGTERM: Saved after step 3  "
        "(0 of 1 runs finished, 1 failed)",
        "task/a-lr0.001-seed0: trained in 0:01:01  (1 of 1 runs finished, 1 failed)",
    ]
