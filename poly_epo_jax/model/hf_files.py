"""Opens the safetensors files of a Hugging Face model folder, and writes them several at a time."""

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from poly_epo_jax.system.json_files import write_json

WRITERS = 4
"""Files that are written at once. The host holds the tensors of these and of the next one."""
SMALLEST_SHARD = 32 * 2**20  # bytes; smaller files cost more time than they save
_SINGLE, _INDEX, _PATTERN = "model.safetensors", "model.safetensors.index.json", "model{suffix}.safetensors"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write files in. It is renamed to `path` at the end, or removed if anything fails.

    Raises:
      FileExistsError: `path` is there already.
      OSError: a file cannot be written.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already; choose another folder, or remove it first.")
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # a process that was killed has left it
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}); make room there, or choose another folder.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def open_tensors(folder: Path) -> dict[str, Any]:
    """Name -> the open file that holds it.

    Raises:
      FileNotFoundError: the folder has no safetensors files, or lacks one.
      ValueError: a file is cut short, or is not a safetensors file.
    """
    if (folder / _INDEX).is_file():
        files = _files(folder / _INDEX)
    elif (folder / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}; convert the model to those.")
    opened = [_open(folder / file) for file in files]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118


def _files(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error}); make or download the model folder again.") from error


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); make or download the model folder again.") from error


def write_tensors(
    folder: Path,
    sizes: Mapping[str, int],
    fetch: Callable[[Sequence[str]], Mapping[str, np.ndarray]],
    max_shard_bytes: int,
) -> None:
    """Writes one file, or several and their index, with a pool of threads.

    Args:
      sizes: of every tensor in bytes, by name, in the order in which they are written.
      fetch: copies one file's tensors to the host while others are written. It is called from this thread alone,
        because programs on several devices must not be started from several threads.
      max_shard_bytes: the size of the largest file, unless it holds a single tensor. Large models are cut into smaller
        files, so that all writers have an even share.

    Raises:
      OSError, SafetensorError: a file cannot be written; the files in progress are waited for.
    """
    even = max(SMALLEST_SHARD, -(-sum(sizes.values()) // (2 * WRITERS)))
    plan = split_state_dict_into_shards_factory(
        dict(sizes), get_storage_size=int, filename_pattern=_PATTERN, max_shard_size=min(max_shard_bytes, even)
    )
    if plan.is_sharded:
        write_json(folder / _INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})

    writing: deque[Future[None]] = deque()
    with ThreadPoolExecutor(WRITERS) as pool:
        for file, names in plan.filename_to_tensors.items():
            content = {name: np.ascontiguousarray(values) for name, values in fetch(names).items()}
            if len(writing) == WRITERS:
                writing.popleft().result()
            writing.append(pool.submit(save_tensors, content, folder / file))
        for shard in writing:
            shard.result()


def save_tensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    """Writes one file of contiguous arrays, which whoever may read this process's other files may read, too.

    Raises:
      OSError, SafetensorError: it cannot be written.
    """
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors 0.8 makes files that only their owner can read (its issue 782)
