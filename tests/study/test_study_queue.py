"""Tests of parallel runs: each run is started once, failures are reported, and signals are forwarded to all runs."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import PATIENCE

from poly_epo_jax.config.keys import Config
from poly_epo_jax.records import run_folder
from poly_epo_jax.study.folder import ATTEMPTS, RunKey, read_attempts
from poly_epo_jax.study.plan import StudyRun
from poly_epo_jax.study.queue import CORE, cores, default_workers, gpus, run_all
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.system.limits import cpu_limit
from poly_epo_jax.system.signals import Stopped


class FakeRun(StudyRun):
    """A run that executes fake_run.py."""

    def __init__(self, folder: Path, how: str = "well", keep_weights: bool = True):
        folder.mkdir(parents=True)
        super().__init__(RunKey("task", folder.name, 1e-3, 0), folder, [str(folder), how], Config(), None, keep_weights)

    @property
    def train_command(self) -> list[str]:
        return ["fake_run", *self.arguments]

    def is_trained(self) -> bool:
        return (self.folder / "done").exists()


@pytest.fixture(autouse=True)
def fake_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", f"{Path(__file__).parents[1] / 'support'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )


def work(folder: Path, runs: Sequence[FakeRun], workers: Sequence[dict[str, str]]) -> tuple[list[Row], list[str]]:
    """Returns the rows of `run_all` and the events that it reported."""
    events: list[str] = []

    def started(run: StudyRun, stage: str) -> None:
        events.append(f"{run.key.method} {stage}")

    def ended(run: StudyRun, row: Row) -> None:
        events.append(f"{run.key.method} {row['exit']}")

    return asyncio.run(run_all(folder, runs, workers, started, ended)), events


def test_failed_run_is_reported_and_other_runs_continue(tmp_path: Path):
    runs = [FakeRun(tmp_path / "a"), FakeRun(tmp_path / "b", "badly"), FakeRun(tmp_path / "c")]
    rows, events = work(tmp_path, runs, [{}])
    assert events == ["a train", "a 0", "b train", "b 1", "c train", "c 0"]
    assert [row["error"] for row in rows] == ["", "no room: make some.", ""]
    assert read_attempts(tmp_path) == rows and rows[1]["run"] == "task/b-lr0.001-seed0"
    assert (tmp_path / "b" / "log.txt").read_text() == "Error: no room: make some.\n"

    runs[1].arguments[1] = "well"
    again, events = work(tmp_path, runs, [{}])
    assert events == ["b train", "b 0"], "finished runs are skipped"
    assert read_attempts(tmp_path) == [*rows, *again]


def test_an_error_of_the_study_itself_is_raised(tmp_path: Path):
    (tmp_path / ATTEMPTS).mkdir()
    with pytest.raises(OSError, match=ATTEMPTS):
        work(tmp_path, [FakeRun(tmp_path / "a")], [{}])


def test_checkpoints_of_finished_runs_are_emptied_unless_kept(tmp_path: Path):
    kept, dropped, failed = (
        FakeRun(tmp_path / "a"),
        FakeRun(tmp_path / "b", keep_weights=False),
        FakeRun(tmp_path / "c", "badly", keep_weights=False),
    )
    for run in (kept, dropped, failed):
        (run.folder / "checkpoints" / "30" / "state").mkdir(parents=True)
        (run.folder / "checkpoints" / "30" / "state" / "weights").touch()
        (run.folder / "checkpoints" / "30" / "digests.json").touch()
        (run.folder / "metrics.jsonl").touch()
    for _ in range(2):
        work(tmp_path, [kept, dropped, failed], [{}])
        assert list((dropped.folder / "checkpoints").rglob("*")) == [dropped.folder / "checkpoints" / "30"]
        assert (dropped.folder / "metrics.jsonl").exists()
        assert all((run.folder / "checkpoints" / "30" / "state" / "weights").exists() for run in (kept, failed))


def test_runs_use_the_devices_of_their_worker_and_start_once(tmp_path: Path):
    runs = [FakeRun(tmp_path / name) for name in "abcdef"]
    rows, events = work(tmp_path, runs, gpus("0+1,2"))
    assert len(rows) == 6 and sorted(events[::1]) == sorted(
        [f"{n} train" for n in "abcdef"] + [f"{n} 0" for n in "abcdef"]
    )
    seen = {(run.folder / "seen.json").read_text() for run in runs}
    assert seen == {'{"gpu": "0,1", "how": "well"}', '{"gpu": "2", "how": "well"}'}


def test_workers_are_cores():
    mine = sorted(os.sched_getaffinity(0))
    assert [worker[CORE] for worker in cores(0)] == [str(core) for core in mine[: cpu_limit()]]
    assert len(cores(2 * len(mine) + 1)) == 2 * len(mine) + 1


def test_default_workers_match_the_devices_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert default_workers(tmp_path) == cores(0)
    (tmp_path / "accel0").touch()
    assert default_workers(tmp_path) == [{}], "a single run uses all TPU chips"
    for name in ("nvidia1", "nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    assert default_workers(tmp_path) == gpus("0,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert default_workers(tmp_path) == gpus("3")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert default_workers(tmp_path) == [{}], "a single run uses all TPU chips"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert default_workers(tmp_path) == cores(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_all_runs_after_they_have_saved(tmp_path: Path, number: signal.Signals, default_signals: None):
    runs = [FakeRun(tmp_path / name, "slowly") for name in "abc"]

    async def interrupted() -> None:
        working = asyncio.create_task(run_all(tmp_path, runs, [{}, {}], print, print))
        deadline = time.monotonic() + PATIENCE
        while not all((tmp_path / name / "started").exists() for name in "ab"):
            assert time.monotonic() < deadline and not working.done()
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), number)
        await working

    with pytest.raises(Stopped) as stopped:
        asyncio.run(interrupted())
    assert stopped.value.number == number
    assert [(tmp_path / name / "saved").exists() for name in "abc"] == [True, True, False]
    rows = read_attempts(tmp_path)
    assert [row["exit"] for row in rows] == [128 + signal.SIGTERM] * 2
    assert all(row["error"].startswith("SIGTERM: Saved after step 3") for row in rows)


def test_study_waits_for_runs_of_a_killed_study(tmp_path: Path):
    run = FakeRun(tmp_path / "a")

    async def wait_and_work() -> list[Row]:
        with run_folder.lock_run_folder(run.folder):
            started = asyncio.Event()
            working = asyncio.create_task(run_all(tmp_path, [run], [{}], lambda *_: started.set(), print))
            await started.wait()
            await asyncio.sleep(0)
            assert not (run.folder / "seen.json").exists()
        return await working

    (row,) = asyncio.run(wait_and_work())
    assert row["exit"] == 0 and run.is_trained()
