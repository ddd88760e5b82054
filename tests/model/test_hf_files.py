"""Tests parallel writing of weight files: distribution over threads, host memory, and write errors."""

import errno
import json
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import PATIENCE
from safetensors.numpy import load_file, save_file

from poly_epo_jax.model import hf_files
from poly_epo_jax.model.hf_files import WRITERS, open_tensors, write_tensors

VALUES = {f"tensor{i:02}": np.random.default_rng(i).normal(size=250).astype(np.float32) for i in range(24)}
SIZES = {name: values.nbytes for name, values in VALUES.items()}


def fetch(names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: VALUES[name] for name in names}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 2_000, 1_000, 1])
def test_written_tensors_are_read_back(tmp_path: Path, max_shard_bytes: int):
    write_tensors(tmp_path, SIZES, fetch, max_shard_bytes)
    source = open_tensors(tmp_path)
    assert source.keys() == VALUES.keys()
    for name, values in VALUES.items():
        np.testing.assert_array_equal(source[name][:], values)
    num_files = {10**9: 1, 2_000: 12, 1_000: 24, 1: 24}[max_shard_bytes]
    assert len(list(tmp_path.glob("*.safetensors"))) == num_files


def test_an_index_beside_a_single_file_must_list_only_this_file(tmp_path: Path):
    write_tensors(tmp_path, SIZES, fetch, 12_000)
    single, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    assert open_tensors(tmp_path).keys() == VALUES.keys()
    save_file(VALUES, single)
    with pytest.raises(ValueError, match=r"contains both model\.safetensors and model\.safetensors\.index\.json"):
        open_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(VALUES, single.name)}))
    assert open_tensors(tmp_path).keys() == VALUES.keys()


def test_a_tensor_in_two_files_is_rejected(tmp_path: Path):
    write_tensors(tmp_path, SIZES, fetch, 12_000)
    first, second = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    save_file(load_file(tmp_path / second) | {"tensor00": np.zeros(3)}, tmp_path / second)
    with pytest.raises(ValueError, match=f"tensor00 in {first} and in {second}"):
        open_tensors(tmp_path)


def test_a_missing_file_of_the_index_is_named(tmp_path: Path):
    write_tensors(tmp_path, SIZES, fetch, 12_000)
    missing = min(tmp_path.glob("*.safetensors"))
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=f"{missing.name} is missing; create or download the model folder"):
        open_tensors(tmp_path)


def test_large_models_are_split_evenly_between_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf_files, "SMALLEST_SHARD", 1_000)
    write_tensors(tmp_path, SIZES, fetch, 10**9)
    held = [sum(values.nbytes for values in load_file(file).values()) for file in tmp_path.glob("*.safetensors")]
    assert len(held) == 2 * WRITERS and set(held) == {sum(SIZES.values()) // (2 * WRITERS)}


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_weight_files_have_the_default_permissions(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        write_tensors(tmp_path, SIZES, fetch, 2_000)
    finally:
        os.umask(before)
    files = list(tmp_path.iterdir())
    assert len(files) == 13 and {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}


def test_files_are_written_in_parallel_while_the_next_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Blocks each write until all threads write and the next file is fetched, so that sequential writes would fail."""
    changed = threading.Condition()
    fetched = begun = written = max_held = 0

    def save(*arguments: Any, **keywords: Any) -> None:
        nonlocal begun, written
        with changed:
            begun += 1
            changed.notify_all()
            assert changed.wait_for(lambda: begun >= WRITERS and fetched > WRITERS, timeout=PATIENCE)
            written += 1

    def watched(names: Sequence[str]) -> dict[str, np.ndarray]:
        nonlocal fetched, max_held
        with changed:
            fetched += 1
            max_held = max(max_held, fetched - written)
            changed.notify_all()
        return fetch(names)

    monkeypatch.setattr(hf_files, "save_file", save)
    write_tensors(tmp_path, SIZES, watched, 1)
    assert (fetched, written, max_held) == (24, 24, WRITERS + 1)


def test_a_write_error_stops_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun = []

    def save(content: Any, path: Path, **keywords: Any) -> None:
        begun.append(path.name)
        if "00002-of" in path.name:
            raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(hf_files, "save_file", save)
    with pytest.raises(OSError, match="disk full"):
        write_tensors(tmp_path, SIZES, fetch, 1)
    assert len(begun) <= WRITERS + 1
