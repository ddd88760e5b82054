"""SHA-256 digests of files and values, which identify them by content, and of folders, to detect modified files."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from poly_epo_jax.system.json_files import write_json

DIGESTS = "digests.json"
_READERS = 4
# Minimum size of a file whose digest is cached. Smaller files are read each time.
_CACHED_BYTES = 2**20
# Minimum age in seconds of a modification for caching a digest, because two writes can have the same time.
_SETTLED_SECONDS = 2.0


def file_digests(files: Sequence[Path]) -> list[str]:
    """Returns the SHA-256 digest of each file, in hexadecimal.

    Digests of large files are cached in poly_epo_jax/digests.json in the user's cache folder (`XDG_CACHE_HOME` or
    ~/.cache), by path, size and modification time in nanoseconds. If this folder is not writable, nothing is cached.

    Raises:
      OSError: If a file cannot be read.
    """
    cache_file = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "poly_epo_jax" / DIGESTS
    cache = _read_cache(cache_file)
    computed: dict[str, str] = {}

    def digest(file: Path) -> str:
        status = file.stat()
        key = f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}"
        if key in cache:
            return cache[key]
        found = _file_digest(file)
        if status.st_size >= _CACHED_BYTES and time.time() - status.st_mtime > _SETTLED_SECONDS:
            computed[key] = found
        return found

    with ThreadPoolExecutor(_READERS) as pool:
        digests = list(pool.map(digest, files))
    if computed and cache_file.is_absolute():  # users without a home directory have no cache
        with contextlib.suppress(OSError):  # the digests are valid without the cache
            write_json(cache_file, _read_cache(cache_file) | computed)
    return digests


def _read_cache(file: Path) -> dict[str, str]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def json_digest(value: Any) -> str:
    """Returns the SHA-256 digest of a value's JSON text, in hexadecimal. Types without a JSON form become text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def write_digests(folder: Path) -> None:
    """Writes the SHA-256 digests of all files of a folder to digests.json. Reads every file."""
    write_json(folder / DIGESTS, _digests(folder, [path.name for path in folder.iterdir() if path.is_file()]))


def check_digests(folder: Path) -> None:
    """Verifies the files of a folder against its digests. A folder without digests.json is not checked.

    Raises:
      ValueError: If a file is missing or was modified.
    """
    if not (folder / DIGESTS).exists():
        return
    try:
        written = json.loads((folder / DIGESTS).read_bytes())
        found = _digests(folder, [name for name in written if "/" not in name and (folder / name).is_file()])
        corrupted = sorted(name for name in written if found.get(name) != written[name])
    except (ValueError, TypeError, RecursionError):
        corrupted = [DIGESTS]
    if corrupted:
        raise ValueError(
            f"{folder} is corrupted: files are missing or were modified ({', '.join(corrupted)}); create the folder "
            f"again, or delete its {DIGESTS} if you modified the files yourself."
        )


def option_digests(section: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digests of the files that options name.

    Args:
      section: Prefix of the keys.
      options: Options by name. Values, and items of lists, that are not the path of a file are skipped.

    Returns:
      Digests by `section.option`, or `section.option[index]` for lists.

    Raises:
      OSError: If a file cannot be read.
    """
    values = {f"{section}.{name}": value for name, value in options.items()}
    for key, value in [*values.items()]:
        values |= {f"{key}[{i}]": item for i, item in enumerate(value)} if isinstance(value, list | tuple) else {}
    # Path.is_file raises an error for long texts, such as templates.
    files = {key: Path(value) for key, value in values.items() if isinstance(value, str) and os.path.isfile(value)}
    return dict(zip(files, file_digests(list(files.values())), strict=True))


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(names, pool.map(_file_digest, (folder / name for name in names)), strict=True))


def _file_digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
