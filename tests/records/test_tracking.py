"""A killed and resumed run writes the same bytes as an uninterrupted run; other sinks and displays of the tracker."""

import errno
import hashlib
import json
import math
import re
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

from poly_epo_jax.metrics.logged import LOGGED_METRICS
from poly_epo_jax.records import progress, tracking
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.records.tracking import Tracker

FILES = ("metrics.jsonl", "timing.jsonl", "timeline.jsonl", "generations.jsonl")
CONFIG = '{"seed": 0}'
WINDOW = {"start": 0.0, "seconds": 1.0, "spans": []}


def log_steps(tracker: Tracker, first: int, last: int) -> None:
    """Logs steps whose values depend only on the step, with generations every second step."""
    for step in range(first, last + 1):
        rng = np.random.default_rng(step)
        if step % 2 == 0:
            rows = [{"problem": "p", "generation": i, "response": f"é\n{i}", "reward": rng.random()} for i in range(3)]
            tracker.log_generations(step, rows)
        tracker.log(step, {"reward": rng.random(), "clusters/correct": rng.normal()})
        if step % 3 == 0:
            tracker.log(step, {"eval/reward": rng.random()})
        window = {"start": 2.0 * step, "seconds": 2.0, "spans": [["update", 0.0, rng.random(), step]]}
        tracker.log_timing(step, {"seconds/step": rng.random()}, window)
        tracker.publish(step)


def contents(run_dir: Path) -> dict[str, bytes]:
    return {name: (run_dir / name).read_bytes() for name in FILES}


def read_events(run_dir: Path) -> list[Event]:
    """Reads TFRecord framing: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    events = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


@pytest.mark.parametrize("checkpoint", [-1, 0, 3, 4])
@pytest.mark.parametrize("partial_row", [b"", b"{", b'{"step": 7, "rewa', b'{"step": 2}'])
def test_resumed_run_writes_the_bytes_of_an_uninterrupted_run(tmp_path: Path, checkpoint: int, partial_row: bytes):
    with Tracker(tmp_path / "uninterrupted", CONFIG, total_steps=9, resume_step=-1) as tracker:
        log_steps(tracker, 0, 9)
    with Tracker(tmp_path / "killed", CONFIG, total_steps=9, resume_step=-1) as tracker:
        log_steps(tracker, 0, 6)
    for name in FILES:
        with (tmp_path / "killed" / name).open("ab") as file:
            file.write(partial_row)
    with Tracker(tmp_path / "killed", CONFIG, total_steps=9, resume_step=checkpoint) as tracker:
        kept = read_rows(tmp_path / "killed" / "metrics.jsonl")
        assert list(dict.fromkeys(row["step"] for row in kept)) == list(range(checkpoint + 1))
        log_steps(tracker, checkpoint + 1, 9)
    assert contents(tmp_path / "killed") == contents(tmp_path / "uninterrupted")
    names = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert names == ["config.json", *sorted(["tensorboard", *FILES])]


def test_resuming_at_the_last_step_only_drops_the_partial_row(tmp_path: Path):
    with Tracker(tmp_path, CONFIG, total_steps=4, resume_step=-1) as tracker:
        log_steps(tracker, 0, 4)
    before = contents(tmp_path)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(before["metrics.jsonl"][:20])
    with Tracker(tmp_path, CONFIG, total_steps=4, resume_step=4):
        assert contents(tmp_path) == before


def test_rows_are_on_disk_when_log_returns_and_read_back_exactly(tmp_path: Path):
    metrics = {"reward": 0.1 + 0.2, "clusters/correct": 1e-300, "policy/loss": -0.0}
    generation = {"problem": "p", "prompt": "x", "generation": 0, "response": 'a\n"b" \u2028 \ud800', "reward": 1.0}
    tracker = Tracker(tmp_path, CONFIG, total_steps=2, resume_step=-1)
    tracker.log_generations(1, [{**generation, "cluster": None, "advantage": None}])
    tracker.log(1, metrics)
    tracker.log_timing(1, {"seconds/step": 2.5}, WINDOW)
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, **metrics}]
    assert read_rows(tmp_path / "timing.jsonl") == [{"step": 1, "seconds/step": 2.5}]
    assert read_rows(tmp_path / "generations.jsonl") == [{"step": 1, **generation, "cluster": None, "advantage": None}]
    tracker.close()


def test_rows_are_plain_json_with_step_first_then_by_name(tmp_path: Path):
    with Tracker(tmp_path, CONFIG, total_steps=2, resume_step=-1) as tracker:
        tracker.log(1, {"z": math.nan, "b": -math.inf, "a": 0.5})
        tracker.log_generations(
            1, [{"reward": np.float32(0.5), "cluster": np.int64(3), "advantage": np.float64("nan")}]
        )
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 0.5, "b": null, "z": null}\n'
    assert (
        tmp_path / "generations.jsonl"
    ).read_text() == '{"step": 1, "advantage": null, "cluster": 3, "reward": 0.5}\n'


def test_config_is_written_as_given_and_replaced(tmp_path: Path):
    for config in ('{"a": 1}', '{ "a": 2,\n "b": "é" }'):
        Tracker(tmp_path / "deep" / "run", config, total_steps=1, resume_step=-1).close()
        assert (tmp_path / "deep" / "run" / "config.json").read_text(encoding="utf-8") == config


def test_read_rows_of_a_missing_file_is_empty(tmp_path: Path):
    assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("corrupted_line", [b"\0\0\0\n", b"[]\n", b"{}\n", b"\xff\n"])
def test_a_corrupted_row_is_reported_and_no_data_is_lost(tmp_path: Path, corrupted_line: bytes):
    with Tracker(tmp_path, CONFIG, total_steps=9, resume_step=-1) as tracker:
        log_steps(tracker, 0, 1)
    path = tmp_path / "metrics.jsonl"
    corrupted = path.read_bytes() + corrupted_line + b'{"step": 2}\n'
    path.write_bytes(corrupted)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}, line 4\b"):
        Tracker(tmp_path, CONFIG, total_steps=9, resume_step=1)
    assert path.read_bytes() == corrupted


def test_tensorboard_has_metrics_and_timing_and_discards_repeated_steps(tmp_path: Path):
    with Tracker(tmp_path, CONFIG, total_steps=9, resume_step=4) as tracker:
        tracker.log(5, {"eval/pass@8": 0.5, "bad": math.nan})
        tracker.log_timing(5, {"seconds/step": 2.0}, WINDOW)
        tracker.publish(5)
    version, start, event = read_events(tmp_path)
    assert (
        version.file_version == "brain.Event:2"
    )  # with this version, a session start makes readers discard later events
    assert (start.session_log.status, start.step) == (SessionLog.START, 5)
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert event.step == 5
    assert math.isnan(values.pop("bad"))
    assert values == {"eval/pass@8": 0.5, "seconds/step": 2.0}


def test_a_full_disk_raises_an_error_that_names_the_run_folder(tmp_path: Path):
    with Tracker(tmp_path, CONFIG, total_steps=9, resume_step=-1) as tracker:
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(OSError, match=rf"{re.escape(str(tmp_path))} \(No space left on device\)") as caught:
            tracker.log(1, {"reward": 0.5})
        assert caught.value.errno == errno.ENOSPC
        (tmp_path / "generations.jsonl").unlink()
        (tmp_path / "generations.jsonl").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left on device"):
            tracker.log_generations(1, [{"response": "x"}])
        (tmp_path / "timeline.jsonl").unlink()
        (tmp_path / "timeline.jsonl").symlink_to("/dev/full")
        with pytest.raises(OSError, match=rf"{re.escape(str(tmp_path))} .*No space left on device"):
            tracker.log_timing(1, {}, WINDOW)


def test_a_run_folder_that_cannot_be_created_raises_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=rf"{re.escape(str(tmp_path))}/file/run .*choose a writable folder") as caught:
        Tracker(tmp_path / "file" / "run", CONFIG, total_steps=9, resume_step=-1)
    assert isinstance(caught.value, NotADirectoryError)


def test_a_folder_named_wandb_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights & Biases writes such a folder to the current folder, and Python imports it as an empty package."""
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ImportError, match="wandb_project='p', but wandb is not installed"):
        tracking._open_logger("wandb", tmp_path / "run", CONFIG, "p")
    sys.modules.pop("wandb", None)


def test_missing_wandb_raises_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="wandb_project='p', but wandb is not installed"):
        Tracker(tmp_path / "run", CONFIG, total_steps=9, resume_step=-1, projects={"wandb": "p"})
    assert not (tmp_path / "run").exists()


def test_wandb_gets_metrics_and_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )
    wandb = types.SimpleNamespace(init=lambda **options: (calls.append(options), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Tracker(tmp_path / "run", CONFIG, total_steps=9, resume_step=-1, projects={"wandb": "p"}) as tracker:
        tracker.log(1, {"reward": 0.5})
        tracker.log_timing(1, {"seconds/step": 2.0}, WINDOW)
        tracker.publish(1)
    digest = hashlib.sha256(str(tmp_path / "run").encode()).hexdigest()[:16]
    options = {"project": "p", "name": "run", "id": digest, "resume": "allow", "config": {"seed": 0}}
    assert calls == [options, (1, {"reward": 0.5, "seconds/step": 2.0}), "finish"]


def test_runs_in_folders_of_the_same_name_have_different_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """W&B rejects ids with characters such as a colon, which a folder may contain."""
    ids = []
    run = types.SimpleNamespace(finish=lambda: None)
    wandb = types.SimpleNamespace(init=lambda **options: (ids.append(options["id"]), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "a" / "x:y", tmp_path / "b" / "x:y", Path("a/x:y")):
        Tracker(folder, CONFIG, total_steps=9, resume_step=-1, projects={"wandb": "p"}).close()
    assert ids[0] == ids[2] != ids[1] and all(re.fullmatch("[0-9a-f]{16}", name) for name in ids)


def test_trackio_gets_metrics_and_timing_but_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    run = types.SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append(""))
    trackio = types.SimpleNamespace(init=lambda **options: (calls.append(options), run)[1])
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with Tracker(tmp_path / "run", CONFIG, total_steps=9, resume_step=-1, projects={"trackio": "p"}) as tracker:
        tracker.log_generations(1, ROWS)
        tracker.log(1, {"reward": 0.5})
        tracker.publish(1)
    name = calls[0].pop("name")
    assert calls == [{"project": "p", "resume": "allow", "config": {"seed": 0}}, (1, {"reward": 0.5}), ""]
    assert re.fullmatch("run-[0-9a-f]{8}", name)


ROW = {"problem": "p", "prompt": "2+2=", "generation": 0, "response": "4", "reward": 1.0, "correct": True, "cluster": 1}
ROWS = [ROW | {"advantage": 0.25}, ROW | {"response": "5", "reward": 0.0, "cluster": None, "advantage": None}]
TABLE = [["2+2=", "4", 1.0, 1, 0.25], ["2+2=", "5", 0.0, None, None]]


def test_wandb_gets_generations_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    run = types.SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: None)
    wandb = types.SimpleNamespace(init=lambda **options: run, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Tracker(tmp_path / "run", CONFIG, total_steps=9, resume_step=-1, projects={"wandb": "p"}) as tracker:
        for step, rows in ((1, []), (2, ROWS)):  # the generations of the first step are not logged
            tracker.log_generations(step, rows)
            tracker.log(step, {"reward": 0.5})
            tracker.publish(step)
    columns = ["prompt", "response", "reward", "cluster", "advantage"]
    assert calls == [(1, {"reward": 0.5}), (2, {"reward": 0.5, "generations": (columns, TABLE)})]
    assert read_rows(tmp_path / "run" / "generations.jsonl") == [{"step": 2, **row} for row in ROWS]


def test_a_logger_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def fails(*arguments, **options):
        raise ConnectionError("no route")

    run = types.SimpleNamespace(log=fails, finish=fails)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: run))
    with Tracker(tmp_path / "run", CONFIG, total_steps=12, resume_step=-1, projects={"wandb": "p"}) as tracker:
        for step in range(1, 13):
            tracker.log(step, {"reward": 0.5})
            tracker.publish(step)
    first, tenth, finish = capsys.readouterr().err.splitlines()
    assert "wandb did not accept step 1: ConnectionError: no route" in first and "number" not in first
    assert "step 10:" in tenth and "number 10 of" in tenth and "did not finish" in finish
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 12


def test_wandb_accepts_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    with Tracker(tmp_path / "run", CONFIG, total_steps=9, resume_step=-1, projects={"wandb": "p"}) as tracker:
        tracker.log(2, {"reward": 0.5})
        tracker.log_generations(2, ROWS)
        tracker.publish(2)
    (table,) = tmp_path.rglob("generations_*.table.json")
    assert json.loads(table.read_text())["data"] == TABLE


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_are_rare_but_include_each_evaluation_and_the_last_step(tmp_path: Path, capsys, clock: list[float]):
    with Tracker(tmp_path, CONFIG, total_steps=40, resume_step=-1) as tracker:
        for step in range(41):
            evaluation = {"eval/reward": 0.25, "eval/correct_clusters@8": 1.5} if step in (0, 7) else {}
            training = {"reward": 0.5, "policy/loss": 1.0} if step else {}
            tracker.log(step, training)
            tracker.log(step, evaluation)
            tracker.log_timing(step, {"seconds/step": 2.0, "tokens_per_second": 12345.6}, WINDOW)
            tracker.publish(step)
            clock[0] += 2.0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{tmp_path}, 40 steps; the first evaluation and step also compile programs."
    # At 2 s per step: the first step, five steps later, the evaluation at 7, every five steps, and the last step 40.
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == [0, 5, 7, 12, 17, 22, 27, 32, 37, 40]
    assert lines[0] == "step 0/40  held-out reward 0.250  held-out correct clusters@8 1.50  12,346 tokens/s  2.00 s"
    assert lines[1].startswith("step 5/40  reward 0.500  12,346 tokens/s  2.00 s")
    assert "\x1b" not in "".join(lines)


def test_a_terminal_shows_all_metrics_on_one_screen(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    training = {name: metric.brief for name, metric in LOGGED_METRICS.items() if metric.brief and "eval" not in name}
    metrics = {name: 0.5 for name in training}
    stages = ("generate", "grade", "logprobs", "update", "evaluate", "checkpoint", "step")
    timing = {f"seconds/{stage}": 1.25 for stage in stages} | {
        "tokens_per_second": 12345.6,
        "sync/step_fraction": 0.0625,
    }
    with Tracker(tmp_path, CONFIG, total_steps=9, resume_step=-1) as tracker:
        tracker.log(0, {name: 0.25 for name in progress._HELD_OUT})
        tracker.publish(0)
        tracker.log(1, metrics)
        tracker.log_timing(1, timing, WINDOW)
        timeline = Timeline()
        tracker.show_stages(timeline)
        with timeline.clock(1).stage("update"), timeline.clock(2).stage("generate"):
            tracker.publish(1)
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "stage: waiting (compiles programs)" in out and re.search("stage: update, generate *\n", out)
    screen = out[out.rindex("training") :].splitlines()
    assert len(screen) <= 12 and max(map(len, screen)) <= 80
    assert "1/9" in out
    shown = [*training.values(), "held out (step 0)", *stages, "sync fraction", "tokens/s"]
    for label in [*shown, "12,346", "0.250", "0.0625"]:
        assert label in "\n".join(screen)


def test_nested_nan_is_never_written_to_json(tmp_path: Path):
    with Tracker(tmp_path, CONFIG, total_steps=2, resume_step=-1) as tracker:
        with pytest.raises(ValueError, match="JSON"):
            tracker.log_generations(1, [{"reward": [math.nan]}])
        tracker.log_generations(1, [{"reward": 1.0}])
    assert json.loads((tmp_path / "generations.jsonl").read_text()) == {"step": 1, "reward": 1.0}


def test_a_resumed_run_is_announced_with_its_name_method_and_step(tmp_path: Path, capsys):
    for step, words in ((4, "resumes after step 4 of 9; the first evaluation"), (9, "resumes after step 9 of 9.")):
        Tracker(tmp_path, CONFIG, total_steps=9, resume_step=step, method="Poly-EPO").close()
        assert capsys.readouterr().out.startswith(f"{tmp_path}: Poly-EPO, {words}")
