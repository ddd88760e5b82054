"""Tests of a run's programs compiled for TPUs, with two layers of the width of Qwen3-4B.

The programs are not run. The tests require the environment of launch/compiler_env.sh, which launch/test.sh all creates.
"""

import json
import os
import subprocess
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from configs import polaris
from poly_epo_jax.bench.aot import command
from poly_epo_jax.bench.aot.command import compile_for
from poly_epo_jax.bench.aot.estimate import Rates
from poly_epo_jax.bench.aot.topology import GPU_SPECS, HOST_SHAPES, TPU_SHAPES, preset_devices
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.parallel.mesh import AXES
from poly_epo_jax.startup.read_config import read_config

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-tpu" / "bin" / "python"

LAYER = 101e6  # Number of weights of one layer.
DECODED_LOGITS = 64 * 151_936  # Slots of a device, and size of the vocabulary.


def compiled(machine: str, output: Path) -> dict:
    words = [PYTHON, "-m", "poly_epo_jax.bench", f"--config=configs/polaris.py:{machine}"]
    words += [f"--compile_for={machine}", "--num_layers=2", f"--output={output}"]
    # Shards layers over both axes, and recomputes their forward pass.
    words += ["--config.mesh.fsdp=2", "--config.mesh.tensor=2", "--config.model.remat=full"]
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
    # With the lowest effort, XLA compiles four times as fast. What the test checks holds with both efforts.
    variables["JAX_EXEC_TIME_OPTIMIZATION_EFFORT"] = "-1.0"
    outcome = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1200)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of: bash launch/compiler_env.sh tpu")
def test_programs_for_tpus(tmp_path: Path):
    found = compiled("v5p-8", tmp_path / "compiled.json")
    gradient, tensor = found["programs"]["gradient"], found["mesh"]["tensor"]
    for name, program in found["programs"].items():
        assert program["vocabulary_arrays"] == [], name
        gathers = [one for one in program["collectives"] if one["in_loop"] and one["kind"] == "all-gather"]
        in_float32 = [one for one in gathers if one["type"] == "f32"]
        if name == "decode":  # Tokens are drawn from float32 logits of the whole vocabulary.
            assert sum(one["sent_bytes"] / one["runs"] for one in in_float32) == DECODED_LOGITS * 4 * (1 - 1 / tensor)
        else:  # Weights, and activations of layers that are sharded over tensor, are gathered in the compute dtype.
            sent = sum(one["sent_bytes"] for one in gathers)
            assert sum(one["sent_bytes"] for one in in_float32) <= 0.02 * sent, name
    # The gradient of each weight is scattered once, in float32. The other scattered arrays are activations, over
    # tensor.
    scattered = [one for one in gradient["collectives"] if one["kind"] == "reduce-scatter" and one["in_loop"]]
    of_weights = sum(one["sent_bytes"] for one in scattered if one["type"] == "f32")
    assert of_weights == pytest.approx(2 * LAYER * 4 / tensor * (1 - 1 / found["mesh"]["fsdp"]), rel=0.01)
    assert any("splash" in kernel for kernel in gradient["kernels"])
    # Two layers: forward pass, recomputation, and backward pass with twice the FLOPs.
    layers = 2 * 2 * LAYER * found["row_tokens"] / 1e12 / tensor
    assert gradient["product_tflop"] > 3.5 * layers
    assert 0 < gradient["useful_share"] < 1 and 0 < found["step"]["gradient_mfu"] < 1
    memory = gradient["memory"]
    assert memory["total"] == sum(memory[key] for key in ("arguments", "results", "temporaries", "resident_elsewhere"))


def test_every_preset_tpu_has_a_shape():
    tpus = [preset for preset in MESHES.values() if preset["device_kind"] not in ("cpu", *GPU_SPECS)]
    assert {(preset["device_kind"], preset["num_devices"]) for preset in tpus} == set(TPU_SHAPES)
    for preset in tpus:
        sizes = [int(size) for size in TPU_SHAPES[preset["device_kind"], preset["num_devices"]].split("x")]
        along = zip(sizes, HOST_SHAPES[preset["num_devices"] // preset["processes"]], strict=False)
        assert all(size % host == 0 for size, host in along)


@pytest.mark.parametrize("name, sizes", [("v5p-8", [4, 4]), ("v6e-16", [16, 4]), ("h200x16", [16, 8])])
def test_decoding_is_compiled_for_a_topology_of_one_process(
    name: str, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    meshes, compiled = [], []

    def make_mesh(available: range, device_kind: str = "", num_devices: int = 0, **axes: int) -> SimpleNamespace:
        assert prod(axes.values()) == len(available)
        meshes.append(SimpleNamespace(shape={axis: axes.get(axis, 1) for axis in AXES}, size=len(available)))
        return meshes[-1]

    monkeypatch.setattr(command, "preset_devices", lambda preset: range(preset["num_devices"]))
    monkeypatch.setattr(command, "make_mesh", make_mesh)
    monkeypatch.setattr(command, "device_rates", lambda preset, devices: Rates(1.0, 1.0, 1.0, None))
    monkeypatch.setattr(command, "ProgramReport", lambda *arguments: SimpleNamespace(programs={}, step=dict))
    monkeypatch.setattr(command, "show_programs", lambda found, console: None)
    monkeypatch.setattr(command, "_programs", lambda config, shape, *given: compiled.extend(given) or ())
    compile_for(read_config(polaris.get_config(name)), name, 2, tmp_path / "out.json", Console())
    assert [mesh.size for mesh in meshes] == sizes and compiled == meshes


@pytest.mark.parametrize(
    "name, message", [("v5p-8", "launch/compiler_env.sh tpu"), ("h200x4", "launch/compiler_env.sh gpu")]
)
def test_a_missing_compiler_raises_an_error_with_the_script(name: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=message):
        preset_devices(MESHES[name])


def test_unsupported_machines_are_rejected(tmp_path: Path):
    config = read_config(polaris.get_config())
    for name, message in (("v7x-8", "choose one of laptop"), ("laptop", "does not support cpu")):
        with pytest.raises(ConfigError, match=message):
            compile_for(config, name, 2, tmp_path / "out.json", Console())
