"""Tests launch/untied.py with a folder that contains a vision model."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from poly_epo_jax.model.hf import load_params, read_model_config, save_pretrained
from poly_epo_jax.model.transformer import init_params

FLOAT32 = {"dtype": "float32", "param_dtype": "float32"}
SCRIPT = Path(__file__).parents[2] / "launch" / "untied.py"


def test_the_copy_of_a_vision_folder_contains_the_language_model(tmp_path):
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40, "head_dim": 4}
    vision = tmp_path / "vision"
    vision.mkdir()
    (vision / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    config = read_model_config(vision, **FLOAT32)
    save_pretrained(tmp_path / "text", init_params(config), config, dtype="float32")
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed | {"vision_tower.weight": np.zeros(3, np.float32)}, vision / "model.safetensors")

    command = [sys.executable, SCRIPT, vision, tmp_path / "copy"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == str(tmp_path / "copy")
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    untied = read_model_config(tmp_path / "copy", **FLOAT32)
    assert untied == dataclasses.replace(config, tie_word_embeddings=False)
    np.testing.assert_array_equal(load_params(tmp_path / "copy", untied)["untied_head"], init_params(config)["embed"])
