"""Tests that commands do not write to, delete or read files outside of their own output folders."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from training_runs import SETTINGS, as_flags

from poly_epo_jax import main as train_main
from poly_epo_jax.evaluate import __main__ as evaluate_main
from poly_epo_jax.export import __main__ as export_main
from poly_epo_jax.model.hf_files import new_folder
from poly_epo_jax.records import run_folder
from poly_epo_jax.rejudge import __main__ as rejudge_main
from poly_epo_jax.report import __main__ as report_main
from poly_epo_jax.study import __main__ as study_main
from poly_epo_jax.system.json_files import append_rows, replace_file
from poly_epo_jax.system.output_folder import LOCK, check_contents, check_output, claim_folder

CONFIG = "--config=configs/polynomial.py"
STUDY = """
from poly_epo_jax.study import Study, StudyTask

def get_study():
    return Study({{"polynomial": StudyTask("polynomial")}}, seeds=(0,), baseline="grpo", folder={!r})
"""


def contents(folder: Path) -> dict[str, bytes | str]:
    """Returns the bytes of all files, and the targets of all links, by path."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {
        name: os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
        for name, path in paths.items()
    }


def train(output: Path, _: Path) -> int:
    return train_main.main([CONFIG, *as_flags(SETTINGS | {"workdir": output})])


def evaluate(output: Path, _: Path) -> int:
    flags = ["--benchmarks=polynomial", "--models=http://127.0.0.1:9", f"--output={output}"]
    return evaluate_main.main([CONFIG, *flags])


def rejudge(output: Path, given: Path) -> int:
    row = {"problem": "1 + 1?", "responses": [*"22345"], "rewards": [1, 1, 0, 0, 0]}
    (given / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return rejudge_main.main([str(given / "rows.jsonl"), CONFIG, "--judge=ngrams", f"--output={output}"])


def report(output: Path, given: Path) -> int:
    append_rows(given / "run" / run_folder.METRICS, [{"step": 1, "reward": 0.5}])
    return report_main.main([str(given / "run"), f"--output={output}"])


def study(output: Path, given: Path) -> int:
    (given / "study.py").write_text(STUDY.format(str(output)))
    return study_main.main([str(given / "study.py"), "--report"])


COMMANDS: dict[str, Callable[[Path, Path], int]] = {
    "train": train,
    "evaluate": evaluate,
    "rejudge": rejudge,
    "report": report,
    "study": study,
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_folder_of_other_files_is_refused_and_not_changed(command: Callable[..., int], tmp_path: Path, capsys):
    output, given = tmp_path / "mine", tmp_path / "given"
    for path in (output / "policy", output / "polynomial" / "label", given / "run"):
        path.mkdir(parents=True)
    names = ("config.json", "data.json", "about.json", "report.html", "results.json", "study.json", LOCK)
    for name in (*names, "policy/config.json"):
        (output / name).write_text("mine")
    before = contents(output)
    assert command(output, given) in (1, 2)
    assert f"{output} contains 'about.json', but no " in capsys.readouterr().err
    assert contents(output) == before


def test_only_folders_of_the_same_kind_are_used_again(tmp_path: Path):
    for name in ("run", "empty"):
        (tmp_path / name).mkdir()
    with claim_folder(tmp_path / "run", "run"):
        (tmp_path / "run" / "config.json").touch()
        check_output(tmp_path / "run", "run")
        with pytest.raises(ValueError, match=r"'config\.json', but no evaluation"):
            check_output(tmp_path / "run", "evaluation")
    (tmp_path / "run" / LOCK).write_text("process 3 on host")  # as written by earlier versions
    for name in ("run", "empty", "new"):
        check_output(tmp_path / name, "run")
    (tmp_path / "run" / LOCK).unlink()
    with pytest.raises(ValueError, match=r"'config\.json', but no run"):
        check_output(tmp_path / "run", "run")


def test_links_and_pipes_in_a_folder_are_refused(tmp_path: Path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    with claim_folder(run, "run"):
        (run / "report").mkdir()
    (tmp_path / "linked").symlink_to(run)
    check_output(tmp_path / "linked", "run")  # a user may place a run folder on another disk
    for name in (LOCK, "tensorboard", "checkpoints.corrupted", "metrics.jsonl.tmp", "report/report.html"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside)
        append_rows(run / run_folder.METRICS, [{"step": 1, "reward": 0.5}])
        (run / run_folder.CHECKPOINTS / "1").mkdir(parents=True, exist_ok=True)
        with pytest.raises(ValueError, match=f"{run / name} is a link"), run_folder.lock_run_folder(run):
            pass
        assert report_main.main([str(run)]) == 2
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)
    os.mkfifo(run / "timing.jsonl")
    with pytest.raises(ValueError, match="special file"):
        check_contents(run)
    assert list(outside.iterdir()) == []


def test_files_are_replaced_without_following_links(tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    for name in ("about.json", "about.json.tmp"):
        (tmp_path / name).symlink_to("secret")
    replace_file(tmp_path / "about.json", [b"new"])
    assert contents(tmp_path) == {"secret": b"secret", "about.json": b"new"}


def test_an_unfinished_folder_of_a_user_is_not_deleted(tmp_path: Path):
    mine = tmp_path / "model.unfinished" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ValueError, match=r"model\.unfinished contains 'notes\.txt'"), new_folder(tmp_path / "model"):
        pass
    assert contents(tmp_path) == {"model.unfinished": "folder", "model.unfinished/notes.txt": b"mine"}


def test_a_model_folder_that_a_killed_process_left_behind_is_removed(tmp_path: Path):
    left = tmp_path / "model.unfinished"
    with claim_folder(left, "unfinished model folder"):
        (left / "model").mkdir()
        save_file({}, left / "model" / "model.safetensors")
    with new_folder(tmp_path / "model") as new:
        (new / "config.json").write_text("{}")
    assert contents(tmp_path) == {"model": "folder", "model/config.json": b"{}"}


def test_an_export_of_a_run_with_links_is_refused(tmp_path: Path, capsys):
    (tmp_path / "run" / run_folder.CHECKPOINTS).mkdir(parents=True)
    (tmp_path / "run" / run_folder.POLICY).symlink_to(tmp_path)
    assert export_main.main([str(tmp_path / "run"), str(tmp_path / "exported")]) == 2
    assert "policy is a link" in capsys.readouterr().err and not (tmp_path / "exported").exists()
