"""Tests of the doctor on a tiny run, with working and with deliberately broken components."""

import argparse
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fakes import PATIENCE

from configs import polynomial
from poly_epo_jax.config.keys import HostsSection
from poly_epo_jax.doctor import __main__ as doctor, collectives, machine
from poly_epo_jax.doctor.runner import CheckResult, CheckRunner, DoctorCheck, Failed, Finding, RunContext, Skipped
from poly_epo_jax.model.attention import IMPLEMENTATIONS, self_check
from poly_epo_jax.parallel import hosts
from poly_epo_jax.startup.read_config import read_config

COMPILED = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], Path(__file__).stem)  # as in conftest.py
TINY = {"base.hidden_size": 16, "base.mlp_size": 32, "base.head_dim": 8, "mesh.fsdp": 1}


def tiny(tmp_path, **changes):
    config = polynomial.get_config()
    folders = {"workdir": str(tmp_path / "run"), "base.cache_dir": str(tmp_path / "base")}
    config.update_from_flattened_dict(
        TINY | folders | {key.replace("__", "."): value for key, value in changes.items()}
    )
    return read_config(config)


def examined(config, *names):
    """Runs the checks with these names, or all checks of the short form, and returns their findings by name."""
    runner = CheckRunner(RunContext(config), 600.0)
    checks = [check for check in doctor.CHECKS if check.when != "full" and (not names or check.name in names)]
    # The long time limit is for busy machines.
    patient = [dataclasses.replace(check, timeout_seconds=600.0) for check in checks]
    return {one.name: one for check in patient for one in runner.findings(check)}


def statuses(findings):
    return {name: one.status for name, one in findings.items()}


@pytest.mark.slow
def test_a_run_on_a_mesh_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(self_check, "SEGMENTS", ((1, 30, 33), (64,)))  # test_whole.py has the whole lengths
    mesh = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    found = examined(tiny(tmp_path, model__dtype="bfloat16", **mesh), "devices", "kernel", "decoding", "collectives")
    assert set(statuses(found).values()) == {"passed"}, found
    # The gradients on the mesh and on one device are not bitwise equal.
    assert 0 < float(found["collectives"].figures["gradient error"]) < 0.02


@pytest.mark.parametrize(
    ("dtype", "break_it"),
    [
        ("float32", lambda out, q, k, v: out * 1.0001),
        ("bfloat16", lambda out, q, k, v: out * jnp.asarray(1.05, out.dtype)),
        ("float32", lambda out, q, k, v: jax.lax.stop_gradient(out)),
        ("float32", lambda out, q, k, v: out.at[0, 3, 0, 0].set(jnp.nan)),
    ],
    ids=["a little too large", "larger", "no gradient", "NaN"],
)
def test_a_broken_kernel_fails(tmp_path, monkeypatch, dtype, break_it):
    correct = IMPLEMENTATIONS["blockwise"]
    monkeypatch.setattr(self_check, "SEGMENTS", ((1, 30, 33),))
    monkeypatch.setitem(IMPLEMENTATIONS, "broken", lambda q, k, v, ids: break_it(correct(q, k, v, ids), q, k, v))
    config = tiny(tmp_path, model__dtype=dtype)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="broken"))
    found, replacement = examined(config, "kernel").values()
    assert (found.status, replacement.status) == ("failed", "passed")
    assert "kernel blockwise" in replacement.message and set(replacement.figures) == set(found.figures)
    assert "kernel broken" in found.message and "set --config.model.attention=blockwise" in found.message
    names = ("values", "dq", "dk", "dv")
    assert set(found.figures) == {f"{kind} of {name}" for kind in ("error", "allowed") for name in names}
    assert any(float(found.figures[f"error of {name}"]) > float(found.figures[f"allowed of {name}"]) for name in names)
    assert json.loads(json.dumps(found.figures, allow_nan=False)) == found.figures


@pytest.mark.slow
def test_decoding_that_differs_from_the_forward_pass_fails(tmp_path, monkeypatch):
    from poly_epo_jax.model import decoding

    correct = decoding.cached_attention
    monkeypatch.setattr(decoding, "cached_attention", lambda q, k, v, visible: 0.9 * correct(q, k, v, visible))
    # The shapes differ from the shapes for which other tests compiled the correct function.
    (found,) = examined(tiny(tmp_path, base__head_dim=12), "decoding").values()
    assert found.status == "failed"
    assert found.message.startswith("embedded: log-probabilities differ")


@pytest.mark.slow
def test_collectives_that_lose_a_gradient_fail(tmp_path, monkeypatch):
    correct = collectives._gradient

    def gradient(model_config, mesh, batch, trainable):
        gradients, loss = correct(model_config, mesh, batch, trainable)
        # Simulates that one device does not contribute to the gradient of one weight.
        return gradients | ({"norm": gradients["norm"] * 0.5} if mesh.size > 1 else {}), loss

    monkeypatch.setattr(collectives, "_gradient", gradient)
    (found,) = examined(tiny(tmp_path, mesh__fsdp=2), "collectives").values()
    assert found.status == "failed"
    assert "the gradient differs from one device's" in found.message


def test_a_disk_that_changes_bits_fails(tmp_path, monkeypatch):
    correct = machine._round_trip

    def round_trip(folder, update, state):
        restored, data = correct(folder, update, state)
        return dataclasses.replace(restored, updates=restored.updates + 1), data

    monkeypatch.setattr(machine, "_round_trip", round_trip)
    (found,) = examined(tiny(tmp_path), "checkpoint").values()
    assert found.status == "failed" and "changed bits" in found.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"mesh__fsdp": 3}, ("mesh.fsdp=3 ", "hidden_size=16", "nearest")),
        ({"mesh__fsdp": 16}, ("mesh.data=1, mesh.fsdp=16, mesh.tensor=1, mesh.expert=1 ", "16 devices", "nearest")),
        ({"mesh__device_kind": "h200", "mesh__num_devices": 8}, ("mesh.device_kind=h200", "cpu")),
    ],
    ids=["not a divisor", "too many", "other devices"],
)
def test_an_invalid_mesh_fails_with_the_nearest_valid_mesh(tmp_path, mesh, words):
    found = examined(tiny(tmp_path, **mesh))
    assert found["devices"].status == "failed" and all(word in found["devices"].message for word in words)
    assert {one.status for name, one in found.items() if name != "devices"} == {"skipped"}


def returns(*findings):
    return DoctorCheck("a check", lambda run: list(findings), 60.0, "remedy", needs_mesh=False)


def raises(error):
    def check(run):
        raise error

    return DoctorCheck("a check", check, 60.0, "do this", needs_mesh=False)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Skipped("no such thing"), "skipped", "no such thing"),
        (Failed("broken; fix it"), "failed", "broken; fix it"),
        (OSError("the disk\n is full; free some space"), "failed", "the disk is full; free some space"),
        (TimeoutError("of another kind"), "failed", "of another kind"),
        (RuntimeError("INTERNAL: driver"), "failed", "RuntimeError: INTERNAL: driver; do this"),
    ],
)
def test_exceptions_of_a_check_become_findings(tmp_path, error, status, message):
    (found,) = CheckRunner(RunContext(tiny(tmp_path)), 60.0).findings(raises(error))
    assert (found.status, found.message) == (status, message)


@pytest.fixture
def hang() -> Iterator[Callable[[RunContext], list[Finding]]]:
    """Returns a check that does not end before the test."""
    is_over = threading.Event()

    def wait(run: RunContext) -> list[Finding]:
        is_over.wait(PATIENCE)
        return []

    yield wait
    is_over.set()


def test_a_check_that_hangs_is_abandoned(tmp_path, hang):
    hangs = DoctorCheck("devices", hang, 0.1, "do this", needs_mesh=False)
    runner = CheckRunner(RunContext(tiny(tmp_path)), 60.0)
    (found,) = runner.findings(hangs)
    assert (found.status, found.message) == ("failed", "the check timed out after 0 s; do this")
    next_one = dataclasses.replace(returns(), needs_mesh=True)
    (skipped,) = runner.findings(next_one)
    assert skipped.status == "skipped" and "'devices'" in skipped.message
    fine = Finding("a check", "passed", "fine")
    assert runner.findings(returns(fine))[0].status == "passed"


def test_a_judge_that_hangs_does_not_skip_the_checks_of_the_devices(tmp_path, hang):
    (judge,) = (check for check in doctor.CHECKS if check.name == "judge")
    runner = CheckRunner(RunContext(tiny(tmp_path)), 60.0)
    hangs = dataclasses.replace(judge, run=hang, timeout_seconds=0.1)
    assert runner.findings(hangs)[0].status == "failed"
    fine = Finding("a check", "passed", "fine")
    assert runner.findings(dataclasses.replace(returns(fine), needs_mesh=True))[0].status == "passed"
    assert runner.timed_out == [hangs]


def test_no_process_starts_a_joint_check_if_another_has_no_mesh(tmp_path, monkeypatch):
    config = dataclasses.replace(tiny(tmp_path), hosts=HostsSection("127.0.0.1:9", 2, 0))

    async def gather(work):
        return [await work] * 2

    monkeypatch.setattr(hosts, "gather", gather)
    together = dataclasses.replace(returns(Finding("a check", "passed", "fine")), needs_mesh=True)
    for others, status in ((True, "passed"), (False, "skipped")):
        monkeypatch.setattr(hosts, "gather_from_all", lambda function, others=others: [function(), others])
        (found,) = CheckRunner(RunContext(config), 60.0).findings(together)
        assert found.status == status


def test_all_checks_together_have_a_time_limit(tmp_path):
    (found,) = CheckRunner(RunContext(tiny(tmp_path)), 0.0).findings(raises(Failed("never called")))
    assert found.status == "skipped" and found.message.startswith("no time was left")


@pytest.mark.parametrize(("seconds", "bound", "status"), [(60, 1, "failed"), (40, 1, "passed"), (0.1, 1e-4, "passed")])
def test_a_step_far_below_its_roofline_fails_unless_it_is_tiny(seconds, bound, status):
    found = machine._speed([{"name": "gradient", "seconds": float(seconds), "roofline_seconds": float(bound)}])
    assert found.status == status and f"{bound / seconds:.0%} of the roofline" in found.message


def test_sigterm_leaves_the_finished_checks_and_names_the_interrupted_one(tmp_path, monkeypatch, capsys):
    ended = threading.Event()

    def interrupted(run: RunContext) -> CheckResult:
        os.kill(os.getpid(), signal.SIGTERM)
        ended.wait()
        return "interrupted", {}

    waits = DoctorCheck("decoding", interrupted, 600.0, "do this", needs_mesh=False)
    monkeypatch.setattr(doctor, "CHECKS", (returns(Finding("devices", "passed", "fine")), waits, returns()))
    output, handler = tmp_path / "doctor.json", signal.getsignal(signal.SIGTERM)
    arguments = ["--config=configs/polynomial.py", "--short", f"--output={output}", "--config.mesh.fsdp=1"]
    try:
        with pytest.raises(SystemExit) as exited:
            doctor.main([*arguments, f"--config.compilation_cache_dir={COMPILED}"])
    finally:
        ended.set()
        signal.signal(signal.SIGTERM, handler)
    assert exited.value.code == 143
    first, second = json.loads(output.read_text())
    assert (first["name"], first["status"]) == ("devices", "passed")
    assert (second["name"], second["status"]) == ("decoding", "failed") and "interrupted" in second["message"]
    assert "Doctor: 1 passed, 1 failed, 0 skipped." in capsys.readouterr().out


@pytest.mark.parametrize(("fine", "code"), [(True, 0), (False, 1)])
def test_table_json_file_and_exit_code(tmp_path, monkeypatch, capsys, fine, code):
    checks = (
        returns(Finding("one", "passed", "[fine]", {"x": 1.5})),
        raises(Skipped("none") if fine else Failed("bad")),
    )
    monkeypatch.setattr(doctor, "CHECKS", checks)
    config, output = tiny(tmp_path, compilation_cache_dir=COMPILED), tmp_path / "runs" / "doctor.json"
    if code:
        with pytest.raises(SystemExit) as ended:
            doctor.run(config, argparse.Namespace(short=True, output=output))
        assert ended.value.code == code
    else:
        doctor.run(config, argparse.Namespace(short=True, output=output))
    printed = capsys.readouterr().out
    assert "[fine]." in printed and f"Doctor: 1 passed, {code} failed, {1 - code} skipped." in printed
    rows = json.loads(output.read_text())
    assert rows[0]["figures"] == {"x": 1.5} and rows[1]["status"] == ("failed" if code else "skipped")
