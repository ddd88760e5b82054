"""SHA-256 digests of the files of a folder, stored in the folder, to detect missing and modified files."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from poly_epo_jax.system.json_files import write_json

DIGESTS = "digests.json"
_READERS = 4


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
        found = _digests(folder, [name for name in written if (folder / name).is_file()])
        corrupted = sorted(name for name in written if found.get(name) != written[name])
    except (ValueError, TypeError):
        corrupted = [DIGESTS]
    if corrupted:
        raise ValueError(
            f"{folder} is corrupted: files are missing or were modified ({', '.join(corrupted)}); create the folder "
            f"again, or delete its {DIGESTS} if you modified the files yourself."
        )


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))
