"""Tests that a model folder from elsewhere cannot run code, read or copy other files, block, or compute without end."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import TINY, TINY_ALPHABET, tiny_params
from huggingface_hub import constants

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.evaluate import __main__ as evaluate_main, models
from poly_epo_jax.model import hf, hf_files
from poly_epo_jax.model.policy import model_digest, open_policy
from poly_epo_jax.rollouts.servers.dialect import ModelInfo
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.tasks.problems import read_source

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path, tokenizer = tmp_path / "model", build_character_tokenizer(TINY_ALPHABET)
    hf.save_pretrained(path, tiny_params(), TINY, dtype="float32", eos_token_id=1, tokenizer=tokenizer)
    (path / "digests.json").unlink()
    return path


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def link(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        secret = folder.parent / "secret"
        secret.write_text("{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)

    return make


def pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def template(text: str) -> Callable[[Path], None]:
    return lambda folder: change(folder / "tokenizer_config.json", chat_template=text)


def number(key: str, value: Any, family: str = "qwen3") -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", **{"model_type": family, "layer_types": None, key: value})


LOOP = "{% for i in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
HOSTILE = {
    "link": (link("tokenizer.json"), r"tokenizer\.json is a link"),
    "linked weights": (link("model.safetensors"), "is a link"),
    "linked card": (link("README.md"), "is a link"),
    "pipe as weights": (pipe("model.safetensors"), "special file"),
    "pipe as configuration": (pipe("config.json"), "special file"),
    "layers": (number("num_hidden_layers", 5_000_000), "num_hidden_layers=5000000 must be at most"),
    "layers of two types": (number("num_hidden_layers", 5_000_000, "smollm3"), "num_hidden_layers=5000000"),
    "endless template": (template(LOOP), "chat template takes"),
    "large template": (template("{{ 'x' * 10**11 }}"), "chat template takes"),
    "template with a tag": (template(f"{{% generation %}}{LOOP}{{% endgeneration %}}"), "chat template takes"),
}


@pytest.mark.parametrize(("make", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_folder_is_refused_in_a_sentence(make: Callable[[Path], None], message: str, folder: Path):
    make(folder)
    with pytest.raises(ValueError, match=message):
        open_policy(folder, ModelSection())


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 7, "..", ["a"], "sub/a.safetensors", "a.bin"])
def test_an_index_that_names_other_files_is_refused(name: Any, folder: Path):
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ValueError, match=rf"{INDEX} is corrupted"):
        hf_files.open_tensors(folder)


def test_links_within_the_folder_and_to_the_cache_of_the_hub_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    digest = model_digest(folder)
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    cache = folder.parent / "hub" / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    for file in list(folder.iterdir()):
        (cache / "blobs" / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(cache / "blobs" / "config.json")
    assert model_digest(snapshot) == digest  # a cache in another place
    with pytest.raises(ValueError, match="is a link"):
        model_digest(folder)
    monkeypatch.setattr(hf_files, "HF_HUB_CACHE", str(folder.parent / "hub"))
    assert model_digest(folder) == digest
    assert constants.HF_HUB_CACHE


@pytest.mark.parametrize("family", ["llama", "smollm3", "qwen3"])
def test_code_of_a_model_folder_is_not_executed(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to the question of transformers
    code = f"open({str(folder / 'executed')!r}, 'w')\nclass A:\n    pass\n"
    for name in ("configuration_a", "tokenization_a"):
        (folder / f"{name}.py").write_text(code)
    number("auto_map", {"AutoConfig": "configuration_a.A", "AutoTokenizer": "tokenization_a.A"}, family)(folder)
    tokenizer_map = {"AutoTokenizer": ["tokenization_a.A", "tokenization_a.A"]}
    change(folder / "tokenizer_config.json", auto_map=tokenizer_map, tokenizer_class="A")
    try:
        open_policy(folder, ModelSection())
    except ValueError as error:
        assert "tokenizer" in str(error)
    assert not (folder / "executed").exists()


def test_the_tokenizer_of_a_served_model_is_chosen_locally(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    named = ModelInfo(path="m", tokenizer_path="/named/by/the/server", weight_version="1")
    monkeypatch.setattr(models, "model_info", lambda *_: asyncio.sleep(0, named))
    flags = ["--config=configs/polynomial.py", "--models=http://127.0.0.1:9", "--benchmarks=polynomial"]
    flags.append(f"--output={folder.parent / 'out'}")
    assert evaluate_main.main(flags) == 1
    error = capsys.readouterr().err
    assert "set --config.model.path" in error and "/named/by/the/server" in error
    opened = []
    monkeypatch.setattr(models, "open_policy", lambda path, _: opened.append(path) or pytest.skip("opened"))
    with pytest.raises(pytest.skip.Exception):
        evaluate_main.main([*flags, f"--config.model.path={folder}"])
    assert opened == [folder] and "Warning: http://127.0.0.1:9 names the tokenizer" in capsys.readouterr().err


def test_a_pipe_is_not_read_as_rows(tmp_path: Path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="not a regular file"):
        read_source(str(tmp_path / "rows.jsonl"))
