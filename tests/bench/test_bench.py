"""Tests of the bench command on a tiny configuration: stages, results and error messages."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tiny_bench
from fork_server import ForkServer

from configs import polaris, polynomial
from poly_epo_jax.bench import __main__ as bench
from poly_epo_jax.bench.roofline import Roofline
from poly_epo_jax.bench.stages import Stage, stage_names
from poly_epo_jax.bench.workload import make_workload
from poly_epo_jax.model import attention
from poly_epo_jax.model.attention import self_check
from poly_epo_jax.startup.read_config import read_config

# conftest.py selects the same folder. Processes, which limit the size of their cache, must not share it.
COMPILED = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], Path(__file__).stem)
TINY = tiny_bench.TINY | {"mesh.fsdp": 1, "compilation_cache_dir": COMPILED}


def tiny_config(**changes):
    config = polynomial.get_config()
    config.update_from_flattened_dict(TINY | changes)
    return config


@pytest.fixture
def small_roofline(monkeypatch):
    """Replaces the measurement of peak rates, which takes seconds, by constants."""
    monkeypatch.setattr(bench, "measure_roofline", lambda dtype: Roofline(1e9, 1e9))


def figures(config, tmp_path, *names):
    read = read_config(config)
    bench.run(read, tmp_path / "bench.json", names or stage_names(read))
    return json.loads((tmp_path / "bench.json").read_text())


@pytest.mark.slow
def test_all_stages_with_the_embedded_sampler(small_roofline, tmp_path, capsys):
    found = figures(tiny_config(), tmp_path)
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert list(stages) == ["generate", "logprobs", "gradient", "optimizer"]
    for stage in stages.values():
        assert stage["seconds"] > 0 and stage["device_bytes"] > 0
        expected = max(stage["flops"], stage["moved_bytes"]) / 1e9
        assert stage["roofline_seconds"] == pytest.approx(expected)
        assert stage["in_step"] and stage["mfu"] is None and stage["peak_bytes"] is None  # The device is a CPU.
        assert stage["bound"] == ("arithmetic" if stage["flops"] >= stage["moved_bytes"] else "memory")
    # Old log-probabilities are computed for the second of two equal minibatches: half of the forward passes of the
    # step, compared with three passes for the gradients.
    assert stages["logprobs"]["flops"] == pytest.approx(stages["gradient"]["flops"] / 6)
    assert stages["gradient"]["planned_bytes"] == sum(
        sum(terms.values()) for terms in (found["plan"]["resident"], found["plan"]["stages"]["gradient"])
    )
    assert found["setting"]["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1}
    assert "gradient" in capsys.readouterr().out


@pytest.mark.slow
def test_weights_for_servers_are_written_and_removed(small_roofline, tmp_path):
    changes = {"rollouts.name": "sglang", "rollouts.urls": "http://127.0.0.1:1", "judge.name": "exact"}
    found = figures(tiny_config(**changes, **{"rollouts.weights_dir": str(tmp_path / "weights")}), tmp_path)
    assert [stage["name"] for stage in found["stages"]] == ["write_weights", "logprobs", "gradient", "optimizer"]
    assert found["stages"][0]["moved_bytes"] > 0
    assert list((tmp_path / "weights").iterdir()) == []


def test_log_probabilities_are_measured_if_no_step_computes_them(small_roofline, tmp_path):
    """With a single minibatch and no KL term, the stage is one pass over all sequences."""
    (stage,) = figures(tiny_config(**{"train.prompts_per_minibatch": 4}), tmp_path, "logprobs")["stages"]
    assert not stage["in_step"] and stage["seconds"] > 0 and stage["tokens_per_second"] > 0
    workload = make_workload(read_config(tiny_config()), 20, {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1})
    assert stage["tokens"] == workload.prompt_lengths.sum() + workload.response_lengths.sum()


def test_each_stage_is_written_when_it_is_measured(small_roofline, tmp_path, monkeypatch):
    """A stage that fails or is killed leaves the stages before it. The rates of the device are those of an H100."""
    output, written = tmp_path / "bench.json", []

    def stages(*_):
        for name in ("generate", "gradient"):
            written.append(len(json.loads(output.read_text())["stages"]))
            yield Stage(name, 2.0, 10, 989e12, 1.0, 0.5, 100)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench, "time_stages", stages)
    monkeypatch.setattr(bench, "device_name", lambda kind: "h100")
    monkeypatch.setattr(bench, "device_peak", lambda: 7 + len(written))
    with pytest.raises(RuntimeError):
        figures(tiny_config(), tmp_path)
    found = json.loads(output.read_text())
    assert written == [0, 1] and [stage["peak_bytes"] for stage in found["stages"]] == [8, 9]
    assert [stage["mfu"] for stage in found["stages"]] == [0.5, 0.5]
    assert (found["setting"]["vendor_tflops"], found["setting"]["vendor_gb_per_second"]) == (989, 3350)


@pytest.mark.parametrize("names", ["generate,gradiant", "write_weights", "gradient,"])
def test_stages_that_the_configuration_does_not_have_are_rejected(names, capsys):
    assert bench.main(["--config=configs/polynomial.py", f"--stages={names}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"Error: --stages={names}") and "generate, logprobs, gradient, optimizer" in line


def test_ahead_of_time_compilation_omits_deterministic_programs(capsys):
    flags = ["--config=configs/polynomial.py", "--compile_for=laptop", "--config.train.deterministic=True"]
    assert bench.main(flags) == 1  # There is no compiler for this machine.
    printed = capsys.readouterr()
    assert "omits train.deterministic" in printed.out and "--compile_for" in printed.err


def test_a_disabled_kernel_is_not_measured(small_roofline, tmp_path, monkeypatch, capsys):
    reference = attention.IMPLEMENTATIONS["blockwise"]
    monkeypatch.setattr(self_check, "SEGMENTS", ((30, 34),))
    broken = {"blockwise": reference, "broken": lambda *x: 1.01 * reference(*x)}
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", broken)
    monkeypatch.setattr(attention, "DEFAULT_IMPLEMENTATIONS", {"cpu": "broken"})
    monkeypatch.setattr(attention, "disabled_kernels", set())
    timed: list[str] = []
    monkeypatch.setattr(
        bench, "time_stages", lambda *_: iter(timed.append(attention.resolve_implementation("auto")) or ())
    )
    figures(tiny_config(compilation_cache_dir=str(tmp_path / "compiled")), tmp_path)
    assert timed == ["blockwise"] and "kernel broken" in capsys.readouterr().err


def test_the_papers_batch_packs_with_less_than_five_percent_padding():
    """Each minibatch has 512 sequences of log-normal length, in microbatches of four rows of 16,384 tokens."""
    workload = make_workload(read_config(polaris.get_config()), 100, {"data": 1, "fsdp": 4, "tensor": 1, "expert": 1})
    assert [len(workload.response_lengths), len(workload.minibatches)] == [1024, 2]
    assert 0.35 * 4096 < workload.response_lengths.mean() < 0.45 * 4096
    assert np.percentile(workload.response_lengths, 99) > 2 * workload.response_lengths.mean()
    assert workload.pad_share < 0.05


def test_an_invalid_mesh_raises_an_error(fork_server: ForkServer):
    outcome = fork_server.run("poly_epo_jax.bench", ["--config=configs/polynomial.py", "--config.mesh.tensor=3"])
    assert outcome.returncode == 1
    assert outcome.stderr.strip().splitlines()[-1].startswith("Error: mesh.")
