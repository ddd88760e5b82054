"""Digests of a folder's files, kept next to them: a file that is not what was written is reported by name."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from poly_epo_jax.system.json_files import write_json

DIGESTS = "digests.json"
_READERS = 4


def write_digests(folder: Path) -> None:
    """Adds the SHA-256 of each file that is in the folder now. This reads all of them."""
    write_json(folder / DIGESTS, _digests(folder, [path.name for path in folder.iterdir() if path.is_file()]))


def check_digests(folder: Path) -> None:
    """Compares each file with its digest. A folder without digests, which others may have made, passes.

    Raises:
      ValueError: a file is missing or was changed.
    """
    if not (folder / DIGESTS).exists():
        return
    try:
        written = json.loads((folder / DIGESTS).read_bytes())
        found = _digests(folder, [name for name in written if (folder / name).is_file()])
        wrong = sorted(name for name in written if found.get(name) != written[name])
    except (ValueError, TypeError):
        wrong = [DIGESTS]
    if wrong:
        raise ValueError(
            f"{folder} is damaged: {', '.join(wrong)} is missing or not what was written; make the folder again, or "
            f"delete its {DIGESTS} if you changed it yourself."
        )


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))
