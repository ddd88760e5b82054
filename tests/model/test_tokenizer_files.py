"""Tests of copied and saved tokenizers: same bytes and tokens, file permissions, and names of transformers 4."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import TINY, TINY_ALPHABET, tiny_params
from transformers import AutoTokenizer

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.model import hf
from poly_epo_jax.model.hf_files import write_tokenizer
from poly_epo_jax.model.policy import open_policy
from poly_epo_jax.startup.base_policy import build_character_tokenizer

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "additional_chat_templates/tools.jinja"),
)


@pytest.fixture(params=[0o022, 0o027])
def file_mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """Default permissions of new files."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def read_only(folder: Path) -> Path:
    for path in folder.iterdir():
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def test_tokenizer_files_are_copied_unchanged_without_their_permissions(tmp_path: Path, file_mode: int):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    for name in (*TOKENIZER_FILES, "config.json", "model.safetensors", "README.md"):
        (source / name).write_text(f'{{"of": "{name}"}}\r\n')
    write_tokenizer(read_only(source), target)
    copied = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_file()}
    assert copied.keys() == set(TOKENIZER_FILES)
    assert all(path.read_bytes() == (source / name).read_bytes() for name, path in copied.items())
    assert modes(target) == {file_mode}


def test_a_run_folder_of_a_read_only_model_can_be_written_again(tmp_path: Path, file_mode: int):
    model, folder = tmp_path / "model", tmp_path / "run/policy"
    tokenizer = build_character_tokenizer(TINY_ALPHABET)
    hf.save_pretrained(model, tiny_params(), TINY, eos_token_id=1, tokenizer=tokenizer)
    policy = open_policy(read_only(model), ModelSection())
    for _ in range(2):
        policy.save_description(folder)
        assert modes(folder) == {file_mode}
        names = {path.name for path in folder.iterdir()}
        assert names == {path.name for path in model.iterdir()} - {"model.safetensors"}
        assert all((folder / name).read_bytes() == (model / name).read_bytes() for name in names - {"digests.json"})
        (folder / "vocab.json").touch()  # of another tokenizer
        read_only(folder)
    assert open_policy(folder, ModelSection()).tokenizer.get_vocab() == tokenizer.get_vocab()


def test_new_tokenizers_are_saved_under_the_class_name_of_transformers_4(tmp_path: Path):
    tokenizer = build_character_tokenizer("xy=<eos>;\n")
    write_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "x=y;<eos>\n"
    assert loaded.encode(text) == tokenizer.encode(text) and loaded.decode(loaded.encode(text)) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == (1, 0)
