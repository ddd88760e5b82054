"""Tests of the program report of a tiny run, compiled for CPUs, and of its tables."""

import json
import math

import jax
import pytest
import tiny_bench
from rich.console import Console

from configs import polynomial
from poly_epo_jax.bench.aot.command import compile_decoding, compile_update
from poly_epo_jax.bench.aot.estimate import Rates
from poly_epo_jax.bench.aot.program_report import ProgramReport
from poly_epo_jax.bench.aot.table import show_programs
from poly_epo_jax.memory_plan.plan import make_plan
from poly_epo_jax.model import flops
from poly_epo_jax.parallel.devices import Machine
from poly_epo_jax.parallel.mesh import AXES
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
    """Returns (report, config, model configuration, setting) for two devices."""
    config = polynomial.get_config()
    config.update_from_flattened_dict(TINY)
    config = read_config(config)
    model_config, mesh = model_shape(config), make_mesh(1, 2, 1, num_devices=2)
    machine, rates = Machine("cpu", dict(mesh.shape)), Rates(1e9, 1e9, 1e6, None)
    report = ProgramReport(config, model_config, mesh, rates, make_plan(config, model_config, machine, None))
    for name, compiled in [*compile_update(config, model_config, mesh), *compile_decoding(config, model_config, mesh)]:
        report.add(name, compiled)
    return report, config, model_config, machine


pytestmark = [pytest.mark.slow, pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")]


def test_results_of_every_program(read):
    report, _, model_config, _ = read
    assert list(report.programs) == ["logprobs", "gradient", "optimizer", "weights for decoding", "decode"]
    for program in report.programs.values():
        assert program["total_seconds"] == pytest.approx(sum(program["seconds"].values()))
        assert math.fsum(program["largest_costs"].values()) <= program["total_seconds"] * (1 + 1e-12)  # rounding
        assert program["memory"]["total"] > 0
    # A device has fewer tokens than a chunk of 128, so the programs contain all of its logits at once.
    for name, logits in (("logprobs", ["f32[80,22]"]), ("gradient", ["f32[80,22]"]), ("optimizer", [])):
        # The arrays that are not float32 are comparisons with the positions of the logits.
        found = report.programs[name]["vocabulary_arrays"]
        assert [array for array in found if array.startswith("f32")] == logits
    forward, gradient = (report.programs[name]["product_tflop"] * 1e12 for name in ("logprobs", "gradient"))
    tokens = 2 * 40  # Tokens of one device.
    weights = flops.weights_per_device(model_config, dict.fromkeys(AXES, 1), of_layers=True)
    assert forward > 2 * weights * tokens
    assert gradient > 3 * 2 * weights * tokens
    gathered = [one for one in report.programs["gradient"]["collectives"] if one["kind"] == "all-gather"]
    assert gathered and sum(one["waited_seconds"] for one in gathered) > 0


def test_the_time_of_a_step_is_the_sum_of_its_programs(read):
    report = read[0]
    step = report.step()
    seconds = {name: report.programs[name]["total_seconds"] for name in step["runs"]}
    assert step["update_seconds"] == pytest.approx(sum(step["runs"][name] * seconds[name] for name in seconds))
    assert step["runs"]["optimizer"] == 2 and step["runs"]["gradient"] == 2 * step["runs"]["logprobs"]
    assert 0 < step["gradient_mfu"] < 1 and 0 < step["update_mfu"] < 1


def test_tables(read):
    report, config, model_config, machine = read
    console = Console(record=True, width=160)
    found = {
        "machine": "two CPUs",
        "mesh": machine.mesh,
        "model": "base",
        "num_layers": model_config.num_layers,
        "remat": model_config.remat,
        "rows_per_device": config.train.rows_per_device,
        "row_tokens": config.train.row_tokens,
        "programs": report.programs,
        "step": report.step(),
    }
    show_programs(json.loads(json.dumps(found)), console)
    text = console.export_text()
    assert all(name in text for name in report.programs) and "not run" in text
    assert "would" not in text, "the tables only describe the compiled programs"
