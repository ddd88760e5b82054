"""Tests of model cards: settings and results of the run, and the command that reproduces it."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from poly_epo_jax.config import default
from poly_epo_jax.export.model_card import FOLDERS, command, model_card
from poly_epo_jax.startup.command_line import read_arguments
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.json_files import append_rows

CHANGES = {
    "workdir": "elsewhere",
    "seed": 7,
    "model.path": "Qwen/Qwen3-0.6B-Base",
    "model.stop_strings": ("<|im_end|>", "<|endoftext|>"),
    "task.name": "math",
    "task.options": {"train": "a folder/it's.jsonl", "held_out": ["b.jsonl", "c.jsonl"], "cpu_seconds": 3.0},
    "judge.name": "answer",
    "optimizer.learning_rate": 1e-6,
    "train.num_steps": 30,
    "log.wandb_project": "",
}


@pytest.fixture
def config() -> dict[str, Any]:
    """Content of config.json."""
    config = default.get_config("grpo")
    for key, value in CHANGES.items():
        section, _, name = key.rpartition(".")
        (config[section] if section else config)[name] = value
    return json.loads(json.dumps(read_config(config).to_dict()))


@pytest.fixture
def run(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    versions = [{"python": "3.11.2", "jax": "0.10.2", "commit": "abc+"}]
    (tmp_path / "about.json").write_text(json.dumps({"method": "GRPO", "versions": versions}))
    rewards = {0: 0.25, 10: 0.5, 20: 0.75, 30: 0.875}
    append_rows(
        tmp_path / "metrics.jsonl",
        [{"step": s, "eval/reward": r, "eval/pass@8": None if s == 10 else r / 2} for s, r in rewards.items()],
    )
    return tmp_path


def test_model_card_contains_method_results_and_versions(run: Path):
    card = model_card(run, 20)
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card, re.DOTALL).groups()  # pyright: ignore
    assert "base_model: Qwen/Qwen3-0.6B-Base" in head and "library_name: transformers" in head
    assert body.startswith("\n# GRPO on math\n") and "the policy after step 20 of 30" in body
    assert "| Held-out reward | 0.25 | 0.75 |" in body and "| Held-out pass@8 | 0.125 | 0.375 |" in body
    assert "0.875" not in body  # later rows do not belong to this checkpoint
    assert "| 3.11.2 | 0.10.2 | abc+ |" in body and "learning rate 1e-06 (linear)" in body


def test_run_without_base_model_and_evaluations(run: Path, config: dict[str, Any]):
    config["model"]["path"] = ""
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    card = model_card(run, 1)
    assert "base_model" not in card and "Held-out" not in card and "a tiny policy" in card


def test_texts_of_the_folder_add_neither_lines_nor_html(run: Path, config: dict[str, Any]):
    config["task"]["name"] = "math\n\n```bash\npip install another-package\n```\n<img src=https://a.b/c>"
    (run / "config.json").write_text(json.dumps(config))
    (run / "about.json").write_text(json.dumps({"method": "GRPO\n# Other"}))
    described = model_card(run, 20).partition("## Training command")[0]
    assert "<img" not in described and "\n# Other" not in described and "\n```" not in described


def test_local_folder_is_not_a_hub_model(run: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run)
    Path(config["model"]["path"]).mkdir(parents=True)
    assert "base_model" not in model_card(run, 20)


def test_command_reproduces_the_configuration(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    words = shlex.split(command(config).replace("\\\n", ""))
    assert words[:3] == ["python", "-m", "poly_epo_jax.main"]
    read = json.loads(json.dumps(read_arguments(words[3:]).to_dict()))
    assert {**read, **{name: None for name in FOLDERS}} == {**config, **{name: None for name in FOLDERS}}
    assert "elsewhere" not in words


def test_run_without_recorded_method_is_rejected(run: Path):
    (run / "about.json").unlink()
    with pytest.raises(ValueError, match="does not name the method"):
        model_card(run, 20)
