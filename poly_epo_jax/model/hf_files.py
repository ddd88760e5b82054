"""Files of a Hugging Face model folder: opens and writes safetensors files, and copies tokenizers."""

import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.system.git_lfs import check_downloaded
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.system.output_folder import check_contents, claim_folder

WRITERS = 4
"""Number of files that are written in parallel. Host memory holds the tensors of these files and of the next one."""
SMALLEST_SHARD = 32 * 2**20  # Bytes. Splitting into smaller files takes more time than it saves.
TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "*.model", "tekken.json", "*.jinja", "*/*.jinja")
"""Patterns of the tokenizer files in a model folder. Files in subfolders are additional chat templates."""
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
"""Patterns of the files of a model folder: configuration, weights, vocabulary and chat templates."""
_SINGLE, _INDEX, _PATTERN = "model.safetensors", "model.safetensors.index.json", "model{suffix}.safetensors"


@contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `path` on exit, or removed after an exception.

    Args:
      path: The folder to create.
      replace: Whether an existing folder is replaced on exit.

    Raises:
      FileExistsError: If `path` already exists and is not replaced.
      ValueError: If `path` with the suffix .unfinished exists, and was not left behind by a killed process.
      OSError: If a file cannot be written.
    """
    if (path.exists() or path.is_symlink()) and not replace:
        raise FileExistsError(f"{path} already exists; choose another folder, or remove it first.")
    unfinished = path.with_name(f"{path.name}.unfinished")
    with claim_folder(unfinished, "unfinished model folder"):
        new = unfinished / path.name
        shutil.rmtree(new, ignore_errors=True)  # left behind by a killed process
        new.mkdir()
        try:
            yield new
            if replace:
                shutil.rmtree(path, ignore_errors=True)
            new.rename(path)
        except SafetensorError as error:
            raise OSError(f"Failed to write {path}: {error}. Free disk space or choose another folder.") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def model_files(folder: Path) -> list[Path]:
    """Returns the files of a model folder, which may come from other people: configuration, weights and vocabulary.

    Raises:
      ValueError: If the folder contains links to files that are neither in the folder nor in the cache of the Hub, or
        other special files, which could block reads, or if a file is a Git LFS pointer.
    """
    real = folder.resolve()
    # A folder snapshots/REVISION of a cache links to the folder blobs, also if the cache is in another place.
    check_contents(folder, [real, real.parent.parent / "blobs", Path(HF_HUB_CACHE).resolve()])
    files = sorted(file for pattern in MODEL_FILES for file in folder.glob(pattern))
    for file in files:
        check_downloaded(file)
    return files


def open_tensors(folder: Path) -> dict[str, Any]:
    """Opens the safetensors files of a folder, and returns its tensors, keyed by name.

    A tensor is a slice of safetensors, with the methods `get_shape` and `get_dtype`. The slice `tensor[:]` reads it.

    Raises:
      FileNotFoundError: If the folder has no safetensors files, or if a file in its index is missing.
      ValueError: If a file is truncated or not a safetensors file, if the index is invalid, if the folder contains both
        model.safetensors and an index of other files, or if two files contain the same tensor. In the last two cases,
        other programs might load other tensors.
    """
    if (folder / _INDEX).is_file():
        files = _files(folder / _INDEX)
        if (folder / _SINGLE).is_file() and files != [_SINGLE]:
            raise ValueError(
                f"{folder} contains both {_SINGLE} and {_INDEX}, which lists other files; remove one of the two models."
            )
    elif (folder / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}; convert the model to safetensors.")
    sources: dict[str, str] = {}
    opened = {file: _open(folder / file) for file in files}
    for file, tensors in opened.items():
        for name in tensors.keys():  # noqa: SIM118
            if name in sources:
                raise ValueError(
                    f"{folder} contains the tensor {name} in {sources[name]} and in {file}; create or download the "
                    "model folder again."
                )
            sources[name] = file
    return {name: opened[file].get_slice(name) for name, file in sources.items()}


def language_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of the language model by the names that they have without a vision model.

    Args:
      tensors: All tensors of a folder. If it contains a vision model, the names of the language model's tensors begin
        with `language_model.` in transformers 4, and with `model.language_model.` in transformers 5. Tensors `mtp.`,
        which predict further tokens in Qwen3.5, are omitted.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    if not any("language_model." in name for name in tensors):
        return tensors
    renamed = {
        re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name): tensor
        for name, tensor in tensors.items()
        if not re.match(r"(model\.)?(vision_tower|multi_modal_projector|visual)\.", name)
    }
    return {name.removeprefix("language_model."): tensor for name, tensor in renamed.items()}


def _files(index: Path) -> list[str]:
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if others := [file for file in files if not re.fullmatch(r"[^/\\]+\.safetensors", file)]:
            raise ValueError(f"{others[0]!r} is not the name of a safetensors file in this folder")
        return files
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is corrupted: {error}. Create or download the model folder again.") from error


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "numpy")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{file} is missing; create or download the model folder again.") from error
    except SafetensorError as error:
        raise ValueError(f"{file} is corrupted: {error}. Create or download the model folder again.") from error


def write_tensors(
    folder: Path,
    sizes: Mapping[str, int],
    fetch: Callable[[Sequence[str]], Mapping[str, np.ndarray]],
    max_shard_bytes: int,
) -> None:
    """Writes tensors with a pool of threads to one file, or to several files and their index.

    Args:
      folder: Existing folder.
      sizes: Size in bytes of each tensor, keyed by name, in the order of writing.
      fetch: Function that copies the tensors of one file to the host while other files are written. It is only called
        from the calling thread, because programs on several devices must not be started from several threads.
      max_shard_bytes: Maximum size of a file in bytes, unless it holds a single tensor. Large models are split into
        smaller files, so that all threads have equal work.

    Raises:
      OSError, SafetensorError: If a file cannot be written. Writes in progress finish first.
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
    """Writes a safetensors file with the default file permissions of the process.

    Args:
      tensors: Contiguous arrays, keyed by name.
      file: File to write.

    Raises:
      OSError, SafetensorError: If the file cannot be written.
    """
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors 0.8 creates files that only their owner can read (safetensors issue 782)


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copies files to a folder. The copies have the default permissions of new files, not the source permissions.

    Args:
      source: Folder of the files, which may be read-only.
      folder: Existing folder. Subfolders are created.
      patterns: Patterns of the names of the files, relative to `source`.

    Raises:
      OSError: If a file cannot be copied.
    """
    for file in (file for pattern in patterns for file in source.glob(pattern) if file.is_file()):
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase | Path, folder: Path) -> None:
    """Writes a tokenizer to a model folder.

    Args:
      tokenizer: A model folder or a new tokenizer. The tokenizer files of a folder are copied unchanged, because older
        versions of transformers cannot load the files that newer versions write. The class name of a new tokenizer is
        written so that transformers 4 and 5 can load it.
      folder: Existing folder to write to.

    Raises:
      OSError: If a file cannot be written.
    """
    if isinstance(tokenizer, Path):
        copy_files(tokenizer, folder, TOKENIZER_FILES)
        return
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_bytes())
    if content["tokenizer_class"] == "TokenizersBackend":  # the name in transformers 5 of PreTrainedTokenizerFast
        write_json(file, content | {"tokenizer_class": "PreTrainedTokenizerFast"})
