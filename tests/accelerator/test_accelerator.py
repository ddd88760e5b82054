"""Tests the command that checks and measures an accelerator: time limits, signals, summary, table and exit codes."""

import asyncio
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE
from rich.console import Console

from configs import polaris
from poly_epo_jax.accelerator import __main__ as command, figures
from poly_epo_jax.accelerator.stages import COMPARED, ROOT, Measurement, Stage, make_stages
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.memory_plan.plan import plan_of
from poly_epo_jax.startup.command_line import read_arguments
from poly_epo_jax.startup.prepare import check_memory, model_shape
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.study.plan import make_runs
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.tasks import TASKS
from studies.accelerator import get_study


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


WRITES = Measurement("writes", 1, python("open('measured/value.json', 'w').write('1.5')"))
FAILS = Measurement("fails", 1, python("raise SystemExit(3)"))
KILLED = Measurement("killed", 1, python("import os; os.kill(os.getpid(), 9)"), -9)
TOO_LARGE = Measurement("large", 1, python(f"raise SystemExit('80 GB {command.DOES_NOT_FIT} 24 GB')"))


def read_values(folder: Path) -> list[dict[str, Any]]:
    return [figures.figure(path.stem, json.loads(path.read_text()), 3.0) for path in folder.glob("*.json")]


def read_nothing(folder: Path) -> list[dict[str, Any]]:
    return []


def run(folder: Path, *stages: Stage, seconds: float = PATIENCE) -> dict[str, Any]:
    """Runs stages and returns the stages of the summary."""
    asyncio.run(command.run_stages(stages, folder, seconds, {"schema": command.SCHEMA}))
    return json.loads((folder / "summary.json").read_text())["stages"]


def test_each_outcome_and_each_figure_is_in_the_summary(tmp_path: Path):
    found = run(
        tmp_path,
        Stage("measured", [KILLED, WRITES], read_values),
        Stage("failing", [FAILS, WRITES], read_nothing),
        Stage("large", [TOO_LARGE], read_nothing),
        Stage("unreadable", [KILLED], lambda folder: json.loads("{")),
        Stage("incorrect", [KILLED], lambda folder: [figures.figure("bytes", "differ " * 30, status="failed")]),
    )
    assert {name: row["status"] for name, row in found.items()} == {
        "measured": "passed",
        "failing": "failed",
        "large": "skipped",
        "unreadable": "failed",
        "incorrect": "failed",
    }
    assert found["measured"]["figures"] == [
        {"name": "value", "measured": 1.5, "expected": 3.0, "ratio": 0.5, "status": "measured"}
    ]
    assert "fails.log" in found["failing"]["messages"][0] and len(found["failing"]["messages"]) == 1
    console = Console(width=120, record=True, file=io.StringIO())
    figures.show(found, console)
    text = console.export_text()
    assert re.search(r"value +1.5 +3 +0.5 +measured", text)
    assert text.count("differ") == 30  # a long text does not shorten the other columns


def test_without_time_all_stages_are_in_the_summary(tmp_path: Path):
    found = run(tmp_path, Stage("measured", [WRITES], read_nothing), Stage("late", [FAILS], read_nothing), seconds=0.0)
    assert {row["status"] for row in found.values()} == {"out of time"}


# The second process waits for a third, which ignores SIGTERM.
THIRD = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("third", "w").write(str(os.getpid()))
time.sleep(3600)
"""
WAITS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {THIRD!r}])"
INTERRUPTED = """
import sys
from test_accelerator import *
waiting = Stage("measured", [WRITES, Measurement("waits", 9, python(WAITS))], read_values)
command.make_stages = lambda is_small: [waiting, Stage("next", [WRITES], read_nothing)]
sys.exit(command.main(["--output", sys.argv[1], "--stages", "measured", "next"]))
"""


def start(code: str, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    paths = (ROOT, ROOT / "tests" / "support", Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "SMALL": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*python(code), str(folder), *arguments], env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def wait_for(file: Path, process: "subprocess.Popen[str]") -> str:
    """Returns the content of a file that a process writes."""
    deadline = time.monotonic() + PATIENCE
    while not (file.exists() and file.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return file.read_text()


def test_sigterm_ends_all_processes_and_keeps_the_measurements(tmp_path: Path):
    process = start(INTERRUPTED, tmp_path)
    third = int(wait_for(tmp_path / "third", process))
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    found = json.loads((tmp_path / "summary.json").read_text())["stages"]
    assert [row["status"] for row in found.values()] == ["stopped", "not started"]
    assert found["measured"]["figures"][0]["measured"] == 1.5 and "value" in output
    status = Path(f"/proc/{third}/stat")  # A zombie has ended.
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


# Reports that a stage starts its first process. The signal then arrives while it starts or runs.
HALTED = """
import pathlib, sys
def report(event, arguments):
    if event == "subprocess.Popen" and arguments[2] is not None:
        pathlib.Path(sys.argv[1], "started").write_text(str(arguments[1]))
sys.addaudithook(report)
from poly_epo_jax.accelerator.__main__ import main
sys.exit(main(["--output", sys.argv[1], "--stages", sys.argv[2]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage.name for stage in make_stages(True)])
def test_sigterm_in_each_stage_leaves_a_summary(stage: str, tmp_path: Path):
    process = start(HALTED, tmp_path, stage)
    wait_for(tmp_path / "started", process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["schema"] == command.SCHEMA and summary["versions"]["jax"]
    assert summary["stages"][stage]["status"] == "stopped"


def test_the_exit_code_is_that_of_the_first_stage_that_failed(tmp_path: Path, monkeypatch, capsys):
    stages = [Stage("a", [KILLED], read_nothing), Stage("b", [FAILS], read_nothing), Stage("c", [FAILS], read_nothing)]
    monkeypatch.setattr(command, "make_stages", lambda is_small: stages)
    assert command.main(["--output", str(tmp_path)]) == 12  # without the last stage
    assert command.main(["--output", str(tmp_path), "--stages", "a"]) == 0
    assert list(json.loads((tmp_path / "summary.json").read_text())["stages"]) == ["a", "b"]  # of both calls
    assert command.main(["--output", str(tmp_path), "--stages", "c", "a"]) == 13
    with pytest.raises(SystemExit, match="2"):
        command.main(["--stages", "d"])
    assert "invalid choice: 'd'" in capsys.readouterr().err


def test_a_folder_with_other_files_is_rejected(tmp_path: Path, capsys):
    """Its folders with the names of stages, such as `tests`, would otherwise be deleted."""
    mine = tmp_path / "tests" / "mine.py"
    mine.parent.mkdir()
    mine.touch()
    assert command.main(["--output", str(tmp_path)]) == 2
    assert "contains 'tests'" in capsys.readouterr().err and mine.exists()


def test_a_plan_that_does_not_fit_is_recognized():
    config = polaris.get_config("h100x1")
    config.model.path = "Qwen/Qwen3-32B"
    checked = read_config(config)
    with pytest.raises(ConfigError, match=command.DOES_NOT_FIT):
        check_memory(checked, *plan_of(checked, model_shape(checked)))


def test_measured_updates_are_compared_with_plan_and_compiled_programs(tmp_path: Path):
    stage = {"name": "gradient", "tokens": 1000, "roofline_seconds": 0.5, "tokens_per_second": 1000.0, "mfu": 0.4}
    stage |= {"peak_bytes": 30e9, "planned_bytes": 40e9, "compile_seconds": 9.0}
    setting = {"device": "NVIDIA H100 80GB HBM3", "device_tflops": 800.0, "vendor_tflops": 1000.0}
    write_json(tmp_path / "Qwen3-4B.json", {"setting": setting, "stages": [stage]})
    found = {one["name"]: one for one in figures.read_bench(tmp_path)}
    assert found["Qwen3-4B, gradient: MFU"]["expected"] == 0.49
    assert found["Qwen3-4B, gradient: tokens/s"]["ratio"] == 0.5
    assert found["Qwen3-4B, gradient: peak GB"]["ratio"] == 0.75


@pytest.mark.parametrize(("kind", "status"), [("deterministic", "failed"), ("default", "measured")])
def test_the_first_difference_after_a_resume_is_named(kind: str, status: str, tmp_path: Path):
    for name, entropy in ((kind, 0.25), (f"{kind}-killed", 0.5)):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "reward": step / 20, "entropy": entropy if step > 13 else 1.0} for step in range(1, 21)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (tmp_path / name / "generations.jsonl").touch()
    gain, difference = figures.read_learning(tmp_path)
    assert gain["measured"] == pytest.approx(0.75) and gain["status"] == "passed"
    assert (difference["measured"], difference["status"]) == ("entropy at step 14", status)


def test_the_configurations_for_a_gpu_are_valid():
    """The rehearsal has smaller ones. An invalid one would be found on the GPU only."""
    checked = 0
    for stage in make_stages(False)[:5]:
        for measurement in stage.measurements:
            if flags := [flag for flag in measurement.command if flag.startswith("--config")]:
                checked += bool(read_arguments(flags))
    assert checked == 16
    del TASKS["random_text"]  # registered by launch/random_text.py


def test_trees_are_those_of_the_first_seed_of_each_method(tmp_path: Path):
    runs = make_runs(dataclasses.replace(get_study(), folder=str(tmp_path)))
    assert COMPARED.split(",") == [run.key.label for run in runs[:2]]


def test_the_named_tests_exist():
    names = (ROOT / "tests" / "accelerator.txt").read_text().split()
    assert len(set(names)) == len(names) >= 20
    for name in names:
        file, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(), name
