"""Files of a run: only complete rows are read, files are replaced atomically, and JAX is not required."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes import group

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.records import run_folder
from poly_epo_jax.system import json_files
from poly_epo_jax.types import Clustering, GradedGroup, JudgeFailure, Problem

ROOT = Path(__file__).parents[2]
NOT_IMPORTED = ("jax", "flax", "orbax", "transformers", "poly_epo_jax.model", "poly_epo_jax.step.update")


def test_reading_and_reporting_do_not_import_jax():
    modules = ["records.run_folder", "records.progress", "records.tracking", "records.timeline"]
    modules += ["system.json_files", "evaluate.folder", "metrics.logged"]
    modules += ["metrics.diversity", "report.build", "report.__main__"]
    modules += ["report", "study.spec", "study.results", "study.page", "system.versions"]
    code = f"import sys; {'; '.join(f'import poly_epo_jax.{name}' for name in modules)}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "poly_epo_jax.report.build" in ran.stdout.split()
    assert set(ran.stdout.split()).isdisjoint(NOT_IMPORTED)


def test_rows_are_read_one_at_a_time_up_to_an_incomplete_line(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    json_files.append_rows(path, [{"b": 1, "a": [2.5], "step": 3}, {"a": [], "step": 4}])
    assert path.read_text() == '{"step": 3, "a": [2.5], "b": 1}\n{"step": 4, "a": []}\n'
    path.write_text(path.read_text() + '{"step": 5, "a": [1]')
    rows = json_files.read_rows(path, {"step": int, "a": list})
    assert [next(rows)["step"], next(rows)["step"], next(rows, None)] == [3, 4, None]
    assert list(json_files.read_rows(tmp_path / "none.jsonl", {})) == []


def test_a_failed_append_leaves_the_file_unchanged(tmp_path: Path):
    """Simulates a full disk with a limit of the file size."""
    path = tmp_path / "rows.jsonl"
    json_files.append_rows(path, [{"step": 3}])
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            json_files.append_rows(path, [{"step": 4, "text": "a" * 100_000}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    json_files.append_rows(path, [{"step": 5}])
    assert [row["step"] for row in json_files.read_rows(path, {"step": int})] == [3, 5]


@pytest.mark.parametrize("line", ["nonsense", "[]", "3", '{"step": "4"}', '{"other": 4}', "[" * 100_000, "\0"])
def test_a_corrupted_line_is_reported_with_path_and_number(tmp_path: Path, line: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"step": 3}}\n{line}\n{{"step": 5}}\n')
    before = path.read_bytes()
    for use in (
        lambda: list(json_files.read_rows(path, {"step": int})),
        lambda: json_files.keep_rows(path, {"step": int}, lambda row: True),
        lambda: json_files.sort_rows(path, {"step": int}, lambda row: row["step"]),
        lambda: run_folder.read_rows(path),
    ):
        with pytest.raises(ValueError, match=rf"^{path}, line 2\b"):
            use()
    assert path.read_bytes() == before


def test_rows_are_kept_and_sorted_byte_for_byte(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step":2,  "x": 0}\n{"x": 1, "step": 1}\n{"step": 3}\n{"step": 1, "cut": sh')
    json_files.keep_rows(path, {"step": int}, lambda row: row["step"] < 3)
    assert path.read_text() == '{"step":2,  "x": 0}\n{"x": 1, "step": 1}\n'
    json_files.sort_rows(path, {"step": int}, lambda row: row["step"])
    assert path.read_text() == '{"x": 1, "step": 1}\n{"step":2,  "x": 0}\n'


def test_a_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "data.json"
    json_files.write_json(path, {"old": 1})

    def parts():
        yield b"half"
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        json_files.replace_file(path, parts())
    assert json.loads(path.read_text()) == {"old": 1}

    synced, replaced = [], []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "replace", lambda *paths: replaced.append((len(synced), *paths)))
    json_files.write_json(path, {"new": 2})
    assert replaced == [(1, tmp_path / "data.json.tmp", path)], (
        "the new file must be on disk before it replaces the old one"
    )


def test_generation_rows_have_the_columns_of_the_schema():
    responses = group(Problem("p", "say a:", "a"), ["a", "b"])
    rewards = np.array([1.0, 0.5], np.float32)
    (correct, incorrect) = run_folder.generation_rows(
        GradedGroup(responses, rewards, rewards == 1, Clustering(np.array([3, 100])))
    )
    expected = {"problem": "p", "prompt": "say a:", "generation": 0, "response": "a", "reward": 1.0, "correct": True}
    assert correct == expected | {"cluster": 3, "rationale": None}
    assert incorrect == expected | {
        **{"generation": 1, "response": "b", "reward": 0.5, "correct": False},
        **{"cluster": 100, "rationale": None},
    }
    failed = run_folder.generation_rows(
        GradedGroup(responses, rewards, rewards == 1, JudgeFailure("broken", "out of order"))
    )
    with_rationales = Clustering(np.array([1, 1]), ("first", "second"))
    explained = run_folder.generation_rows(GradedGroup(responses, rewards, rewards == 1, with_rationales))
    assert [row["cluster"] for row in failed] == [None, None]
    assert [row["rationale"] for row in explained] == ["first", "second"]
    for row in (correct, incorrect, *failed, *explained):
        assert all(isinstance(row[name], kind) for name, kind in run_folder.GENERATION.items())


def test_a_step_is_evaluated_if_it_has_an_evaluation_row(tmp_path: Path):
    assert not run_folder.is_evaluated(tmp_path, 0)
    rows = [{"step": 0, "eval/reward": 0.5}, {"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}]
    json_files.append_rows(
        tmp_path / run_folder.METRICS, [*rows, {"step": 2, "eval/reward": 0.5}, {"step": 3, "reward": 0.5}]
    )
    assert [run_folder.is_evaluated(tmp_path, step) for step in range(5)] == [True, False, True, False, False]


def test_a_run_is_resumable_once_it_has_a_checkpoint(tmp_path: Path):
    assert run_folder.resumable_config(tmp_path) is None
    json_files.write_json(tmp_path / run_folder.CONFIG, {"seed": 1})
    (tmp_path / run_folder.CHECKPOINTS / "50.orbax-checkpoint-tmp-1700000000").mkdir(parents=True)
    assert run_folder.resumable_config(tmp_path) is None
    (tmp_path / run_folder.CHECKPOINTS / "50").mkdir()
    with pytest.raises(ConfigError, match=r"contains checkpoints but no about\.json and no metrics\.jsonl"):
        run_folder.resumable_config(tmp_path)
    (tmp_path / run_folder.POLICY).mkdir()
    for name in (run_folder.ABOUT, run_folder.METRICS):
        (tmp_path / name).touch()
    assert run_folder.resumable_config(tmp_path) == {"seed": 1}
