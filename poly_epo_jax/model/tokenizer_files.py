"""Writes tokenizers to model folders: unchanged copies of the files of another folder, or new tokenizers."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from poly_epo_jax.system.json_files import write_json

PATTERNS = ("*token*.json", "vocab.*", "merges.txt", "*.model", "tekken.json", "*.jinja", "*/*.jinja")
"""Patterns of the tokenizer files in a model folder. Files in subfolders are additional chat templates."""


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
        copy_files(tokenizer, folder, PATTERNS)
        return
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_bytes())
    if content["tokenizer_class"] == "TokenizersBackend":  # the name in transformers 5 of PreTrainedTokenizerFast
        write_json(file, content | {"tokenizer_class": "PreTrainedTokenizerFast"})
