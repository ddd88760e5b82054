"""Tests which files of a policy are read, and its stop tokens: their sources, and ids outside the embedding."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import TINY, TINY_ALPHABET, tiny_params
from transformers import AutoConfig, GenerationConfig

from poly_epo_jax.config.keys import ConfigError, ModelSection
from poly_epo_jax.model import hf, policy
from poly_epo_jax.model.policy import check_stop_ids, open_policy
from poly_epo_jax.startup.base_policy import build_character_tokenizer

SECTION = ModelSection()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without any end-of-sequence token."""
    hf.save_pretrained(tmp_path / "model", tiny_params(), TINY, dtype="float32")
    tokenizer = build_character_tokenizer(TINY_ALPHABET)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def set_eos(file: Path, eos: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | {"eos_token_id": eos}))


@pytest.mark.parametrize("eos", [3, [3, 5]])
def test_end_of_sequence_tokens_of_config_json(folder: Path, eos: int | list[int]):
    expected = (3,) if eos == 3 else (3, 5)
    set_eos(folder / "config.json", eos)
    assert open_policy(folder, SECTION).stop_ids == expected  # generation_config.json contains null
    (folder / "generation_config.json").unlink()
    assert open_policy(folder, SECTION).stop_ids == expected
    assert GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).eos_token_id == eos
    set_eos(folder / "generation_config.json", 7)
    assert open_policy(folder, SECTION).stop_ids == (7,)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 7


def test_end_of_sequence_token_of_the_tokenizer(folder: Path):
    set_eos(folder / "generation_config.json", 7)
    build_character_tokenizer(TINY_ALPHABET).save_pretrained(folder)
    assert open_policy(folder, SECTION).stop_ids == (1, 7)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", [TINY.vocab_size, [1, TINY.vocab_size]])
def test_stop_tokens_outside_the_embedding_raise_an_error(folder: Path, name: str, eos: int | list[int]):
    set_eos(folder / name, eos)
    wrong = eos[-1] if isinstance(eos, list) else eos
    with pytest.raises(ValueError, match=f"id {wrong}, but the policy's embedding has only {TINY.vocab_size} rows"):
        open_policy(folder, SECTION)


@pytest.mark.parametrize("eos", ["<eos>", [True], 1.5, {}, -1])
def test_malformed_stop_tokens_raise_an_error(folder: Path, eos: Any):
    set_eos(folder / "generation_config.json", eos)
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id=.* must be a token id"):
        open_policy(folder, SECTION)


def test_a_policy_without_stop_tokens_cannot_be_trained(folder: Path):
    policy = open_policy(folder, SECTION)
    assert policy.stop_ids == ()
    with pytest.raises(ConfigError, match=r"has no stop tokens: .*model\.stop_strings"):
        check_stop_ids(policy)
    check_stop_ids(open_policy(folder, ModelSection(stop_strings=(TINY_ALPHABET[0],))))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_files_that_git_lfs_did_not_download_raise_an_error(folder: Path, name: str):
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(ValueError, match=rf"{name} is a Git LFS pointer without the contents; run git lfs pull"):
        open_policy(folder, ModelSection())


def test_an_address_of_a_bucket_raises_an_error_that_names_the_remedy():
    with pytest.raises(OSError, match=r"gs://bucket/model.*mount the bucket"):
        policy.find_model("gs://bucket/model")


def test_weights_of_an_unsupported_model_of_the_hub_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    requested = []

    def snapshot(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
        requested.append((name, allow_patterns))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown_family"}))
        return str(tmp_path)

    monkeypatch.setattr(policy, "snapshot_download", snapshot)
    with pytest.raises(ValueError, match=r"unknown_family.*models\.md"):
        policy.find_model("organization/name")
    assert requested == [("organization/name", ["config.json"])]
