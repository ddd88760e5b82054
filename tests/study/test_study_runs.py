"""Tests of studies with real runs: reproducibility after interruption and with a failed run."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import halting
import jax
import pytest
from fork_server import ForkServer
from halting import HaltPoint
from training_runs import SETTINGS, environment

from poly_epo_jax.study.folder import last_row, read_attempts

ROOT = Path(__file__).parents[2]
NUM_STEPS = 6
SMALL = {key: value for key, value in SETTINGS.items() if key != "task.options"} | {
    "train.num_steps": NUM_STEPS,
    "checkpoint.every": 2,
    "eval.every": 3,
}
OPTIONS = {"max_coefficient": 1, "max_constant": 9, "max_x": 1, "num_train": 28, "num_held_out": 8}
RUNS = ("poly_epo-lr0.001-seed0", "grpo-lr0.001-seed0")

pytestmark = pytest.mark.slow


class Started:
    """A study file, with methods to start its command."""

    def __init__(self, root: Path, name: str, caches: Mapping[str, Path], methods: str, arguments: Sequence[str] = ()):
        self.folder, self._file, self._log = root / name, root / f"{name}.py", root / f"{name}.log"
        settings = SMALL | {"task.options": OPTIONS} | {key: str(value) for key, value in caches.items()}
        self._file.write_text(
            f"from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask\n\n\n"
            f"def get_study():\n"
            f"    return Study({{'polynomial': StudyTask({str(halting.FILE)!r})}}, {methods},\n"
            f"        learning_rates=(1e-3,), seeds=(0,),\n"
            f"        settings={settings!r}, baseline='grpo', evaluation=Evaluation(num_generations=8),\n"
            f"        folder={str(self.folder)!r})\n"
        )
        self.arguments = [str(self._file), *arguments]

    def start(self, halt: HaltPoint | None = None) -> "subprocess.Popen[bytes]":
        """Starts the command. If `halt` is not None, the run that reaches it waits there."""
        command = [sys.executable, "-m", "poly_epo_jax.study", *self.arguments]
        with self._log.open("ab") as log:
            variables = environment() | (halt.variables if halt else {})
            return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)

    def finish(self) -> int:
        process = self.start()
        try:
            return process.wait(timeout=halting.SECONDS)
        finally:
            process.kill()

    def run(self, name: str) -> Path:
        return self.folder / "polynomial" / name

    def log(self) -> str:
        return self._log.read_text()


BOTH = "{name: PAPER_METHODS[name] for name in ('poly_epo', 'grpo')}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, caches: dict[str, Path]) -> Started:
    study = Started(tmp_path_factory.mktemp("studies"), "whole", caches, BOTH)
    assert study.finish() == 0, study.log()
    return study


def test_all_runs_are_trained_evaluated_and_reported(whole: Started):
    assert sorted(path.name for path in (whole.folder / "polynomial").iterdir()) == sorted(RUNS)
    for name in RUNS:
        assert last_row(whole.run(name) / "metrics.jsonl")["step"] == NUM_STEPS
        assert (whole.folder / "evaluation" / "polynomial" / f"polynomial-{name}" / "results.json").exists()
        assert f"polynomial/{name}: trained in 0:0" in whole.log()
    assert "(2 of 2 runs finished)" in whole.log()
    page = (whole.folder / "report" / "report.html").read_text()
    assert "<b>2 of 2 runs finished</b>" in page and "Branching on polynomial" in page
    assert f"<td>{jax.__version__}</td>" in page


def test_finished_study_is_not_changed(whole: Started):
    names = ["metrics.jsonl", "timing.jsonl", "about.json", "log.txt"]
    before = [(whole.run(run) / name).read_bytes() for run in RUNS for name in names]
    attempts = read_attempts(whole.folder)
    assert whole.finish() == 0
    assert [(whole.run(run) / name).read_bytes() for run in RUNS for name in names] == before
    assert read_attempts(whole.folder) == attempts


def test_resumed_study_with_a_failed_run_produces_identical_files(
    whole: Started, caches: dict[str, Path], default_signals: None
):
    """Stopped once by SIGTERM, after which runs save, and once by SIGKILL, after which active runs continue.

    The second of three runs fails, and does not stop the study.
    """
    poly_epo, grpo = (f"{name!r}: PAPER_METHODS[{name!r}]" for name in ("poly_epo", "grpo"))
    methods = f"{{{poly_epo}, 'broken': {{'train.max_prompt_tokens': 1}}, {grpo}}}"
    study = Started(whole.folder.parent, "resumed", caches, methods, ["--num_parallel=1"])
    halt = HaltPoint(study.folder.with_name("halted"), "push 3")
    process = study.start(halt)
    halt.wait(process, log=study.log)
    assert last_row(study.run(RUNS[0]) / "metrics.jsonl")["step"] == 3 and not study.run(RUNS[1]).exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=halting.SECONDS) == 128 + signal.SIGTERM, study.log()
    assert "SIGTERM: all runs have saved their last step." in study.log()
    saved = max(int(path.name) for path in (study.run(RUNS[0]) / "checkpoints").iterdir() if path.name.isdigit())
    assert saved >= 3 and last_row(study.run(RUNS[0]) / "metrics.jsonl")["step"] == saved

    halt = HaltPoint(study.folder.with_name("halted"), "push 1")  # The first run has completed three steps.
    process = study.start(halt)
    halt.wait(process, log=study.log)
    assert last_row(study.run(RUNS[1]) / "metrics.jsonl")["step"] == 1
    process.kill()
    process.wait()
    halt.resume()
    assert study.finish() == 1, study.log()
    for name in RUNS:
        for file in ("metrics.jsonl", "generations.jsonl"):
            assert (study.run(name) / file).read_bytes() == (whole.run(name) / file).read_bytes()
    stages = [(row["run"], row["stage"], row["exit"]) for row in read_attempts(study.folder)]
    assert stages[0] == (f"polynomial/{RUNS[0]}", "train", 128 + signal.SIGTERM)
    assert stages.count((f"polynomial/{RUNS[0]}", "evaluate", 0)) == 1
    failed, last = "polynomial/broken-lr0.001-seed0", study.log().splitlines()
    assert [stage for stage in stages if stage[0] == failed] == [(failed, "train", 1)] * 2
    assert any(line.startswith(f"{failed}: train failed after") for line in last)
    assert any(line.startswith(f"Error: 1 of 3 runs failed: {failed}.") for line in last)
    assert "<b>2 of 3 runs finished</b>" in (study.folder / "report" / "report.html").read_text()


def test_invalid_settings_are_reported_before_runs_start(
    fork_server: ForkServer, tmp_path: Path, caches: dict[str, Path]
):
    study = Started(tmp_path, "mistaken", caches, "{'grpo': {'algo.loss': 'ppo'}, 'b': {'algo.los': 1}}")
    ended = fork_server.run("poly_epo_jax.study", study.arguments)
    assert ended.returncode == 2
    first, second = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert first.startswith("Error: polynomial/grpo-lr0.001-seed0: algo.loss='ppo'") and "algo.los;" in second
    assert not study.folder.exists()
