"""Tests of the progress display of studies: active runs on a terminal, and a line per event elsewhere."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from test_study_queue import FakeRun

from poly_epo_jax.study import progress
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
        show.started(run, "train")
    screen.print(show)
    shown = file.getvalue()
    assert "task/a-lr0.001-seed0" in shown and "step 4 of 6" in shown and "not started" in shown
    assert "0 of 2 runs finished" in shown

    show.ended(runs[0], ROW)
    show.ended(runs[1], ROW | {"exit": 1, "error": "no [room]: make some."})
    file.truncate(0)
    screen.print(show)
    assert "step" not in file.getvalue() and "1 of 2 runs finished, 1 failed" in file.getvalue()


def test_each_event_is_a_line_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = FakeRun(tmp_path / "a")
    screen, file = console(terminal=False)
    show = StudyProgress([run], 0, screen)
    show.started(run, "train")
    assert capsys.readouterr().out == "0 of 1 runs finished\ntask/a-lr0.001-seed0: train\n"
    show.ended(run, ROW | {"exit": 1, "error": "no [room]: make some."})
    show.ended(run, ROW | {"exit": 143, "error": "SIGTERM: Saved after step 3"})
    show.ended(run, ROW)
    assert file.getvalue().splitlines() == [
        "task/a-lr0.001-seed0: train failed after 0:01:01: no [room]: make some.  (0 of 1 runs finished, 1 failed)",
        "task/a-lr0.001-seed0: train was stopped after 0:01:01: SIGTERM: Saved after step 3  "
        "(0 of 1 runs finished, 1 failed)",
        "task/a-lr0.001-seed0: trained in 0:01:01  (1 of 1 runs finished, 1 failed)",
    ]


def test_the_remaining_time_follows_from_the_steps_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At the start, one of four runs has half of its steps, so 3.5 runs are left."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    runs = [FakeRun(tmp_path / name) for name in "abcd"]

    def log(run: FakeRun, step: int) -> None:
        (run.folder / "config.json").write_text(json.dumps({"train": {"num_steps": 8}, "eval": {"every": 0}}))
        (run.folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')

    log(runs[0], 4)
    screen, file = console(terminal=True)
    show = StudyProgress(runs, 0, screen)
    for run in runs[:2]:
        show.started(run, "train")
    screen.print(show)
    assert "0 of 4 runs finished, 0:00:00" in file.getvalue()
    now[0] = 60.0
    log(runs[0], 6)
    log(runs[1], 2)
    screen.print(show)  # half of a run in a minute: the other 3 runs take 6 minutes
    assert "0 of 4 runs finished, about 0:06:00 left, 0:01:00" in file.getvalue()
    now[0] = 120.0
    show.ended(runs[0], ROW)  # 0.75 runs in two minutes: the other 2.75 take 7 min 20 s
    assert "(1 of 4 runs finished, about 0:07:20 left)" in file.getvalue()
