"""The figures of a tiny run's programs, compiled for CPUs: they agree with each other, and the tables show them."""

import json

import jax
import pytest
import tiny_bench
from rich.console import Console

from configs import polynomial
from poly_epo_jax.bench.aot.estimate import Rates
from poly_epo_jax.bench.aot.figures import Figures
from poly_epo_jax.bench.aot.programs import compile_decoding, compile_update
from poly_epo_jax.bench.aot.table import show
from poly_epo_jax.memory_plan.plan import make_plan
from poly_epo_jax.model import flops
from poly_epo_jax.parallel.devices import Setting
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.startup.prepare import model_shape
from poly_epo_jax.startup.read_config import read_config

TINY = tiny_bench.TINY | {
    "model.remat": "full",
    "model.scan_unroll": 1,
    "mesh.fsdp": 2,
    "train.row_tokens": 40,
}


@pytest.fixture(scope="module")
def read():
    """(figures, config, shape, setting) of every program on two devices."""
    config = polynomial.get_config()
    config.update_from_flattened_dict(TINY)
    config = read_config(config)
    shape, mesh = model_shape(config), make_mesh(1, 2, 1, devices=2)
    setting, rates = Setting("cpu", dict(mesh.shape)), Rates(1e9, 1e9, 1e6, None)
    figures = Figures(config, shape, mesh, rates, make_plan(config, shape, setting, None))
    for name, compiled in [*compile_update(config, shape, mesh), *compile_decoding(config, shape, mesh)]:
        figures.add(name, compiled)
    return figures, config, shape, setting


pytestmark = [pytest.mark.slow, pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")]


def test_every_program_has_its_figures(read):
    figures, _, shape, _ = read
    assert list(figures.programs) == ["logprobs", "gradient", "optimizer", "weights for decoding", "decode"]
    for program in figures.programs.values():
        assert program["total_seconds"] == pytest.approx(sum(program["seconds"].values()))
        assert sum(program["largest_costs"].values()) <= program["total_seconds"]
        assert program["memory"]["total"] > 0
    # A chunk of 128 tokens is more than a device has here, so that all logits are there at once, and are found.
    for name, logits in (("logprobs", ["f32[80,22]"]), ("gradient", ["f32[80,22]"]), ("optimizer", [])):
        found = figures.programs[name]["vocabulary_arrays"]  # beside the logits, what compares with their positions
        assert [array for array in found if array.startswith("f32")] == logits
    forward, gradient = (figures.programs[name]["product_tflop"] * 1e12 for name in ("logprobs", "gradient"))
    tokens = 2 * 40  # of one device
    assert forward > 2 * flops.layer_weights(shape) * tokens
    assert gradient > 3 * 2 * flops.layer_weights(shape) * tokens
    gathered = [one for one in figures.programs["gradient"]["collectives"] if one["kind"] == "all-gather"]
    assert gathered and sum(one["waited_seconds"] for one in gathered) > 0


def test_a_step_is_its_programs_as_often_as_they_run(read):
    figures = read[0]
    step = figures.step()
    seconds = {name: figures.programs[name]["total_seconds"] for name in step["runs"]}
    assert step["update_seconds"] == pytest.approx(sum(step["runs"][name] * seconds[name] for name in seconds))
    assert step["runs"]["optimizer"] == 2 and step["runs"]["gradient"] == 2 * step["runs"]["logprobs"]
    assert 0 < step["gradient_mfu"] < 1 and 0 < step["update_mfu"] < 1


def test_the_tables_show_them(read):
    figures, config, shape, setting = read
    console = Console(record=True, width=160)
    found = {
        "machine": "two CPUs",
        "mesh": setting.mesh,
        "model": "base",
        "num_layers": shape.num_layers,
        "remat": shape.remat,
        "rows_per_device": config.train.rows_per_device,
        "row_tokens": config.train.row_tokens,
        "programs": figures.programs,
        "step": figures.step(),
    }
    show(json.loads(json.dumps(found)), console)
    text = console.export_text()
    assert all(name in text for name in figures.programs) and "Nothing was run." in text
