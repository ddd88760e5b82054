"""The doctor on a tiny run. All passes; then a kernel, decoding, a mesh, a disk and devices are broken on purpose."""

import dataclasses
import json
import os
import time

import jax
import jax.numpy as jnp
import pytest

from configs import polynomial
from poly_epo_jax.config.keys import HostsSection
from poly_epo_jax.doctor import collectives, disk, step
from poly_epo_jax.doctor import command as doctor
from poly_epo_jax.doctor.examine import Check, Examination, Failed, Finding, Missing, Subject
from poly_epo_jax.model.attention import IMPLEMENTATIONS
from poly_epo_jax.parallel import hosts
from poly_epo_jax.startup.read_config import read_config

COMPILED = os.environ["JAX_COMPILATION_CACHE_DIR"]  # as it is
TINY = {"base.hidden_size": 16, "base.mlp_size": 32, "base.head_dim": 8, "mesh.fsdp": 1}


def tiny(tmp_path, **changes):
    config = polynomial.get_config()
    folders = {"workdir": str(tmp_path / "run"), "base.cache_dir": str(tmp_path / "base")}
    config.update_from_flattened_dict(
        TINY | folders | {key.replace("__", "."): value for key, value in changes.items()}
    )
    return read_config(config)


def examined(config, *names):
    """By name, what the checks of these names find; of all in the short form where none is given."""
    examination = Examination(Subject(config), 600.0)
    checks = [check for check in doctor.CHECKS if check.when != "full" and (not names or check.name in names)]
    patient = [dataclasses.replace(check, seconds=600.0) for check in checks]  # even on a busy machine
    return {one.name: one for check in patient for one in examination.findings(check)}


def statuses(findings):
    return {name: one.status for name, one in findings.items()}


@pytest.mark.slow
def test_a_run_on_one_device_passes(tmp_path):
    found = examined(tiny(tmp_path))
    absent = dict.fromkeys(("collectives", "servers", "judge"), "not there")
    assert statuses(found) == dict.fromkeys(("devices", "kernel", "decoding", "checkpoint"), "passed") | absent
    assert found["devices"].seen.endswith("mesh data 1, fsdp 1, tensor 1")
    kernel = found["kernel"]  # of model.attention=auto, by its own name
    assert kernel.seen.startswith("the attention kernel blockwise is correct on cpu: ")
    for name in ("values", "dq", "dk", "dv"):
        error, most = (float(kernel.figures[f"{kind} of {name}"]) for kind in ("error", "allowed"))
        assert error <= most < 1e-3 and f"{name} {error:.1e} ({most:.1e})" in kernel.seen
    assert list(tmp_path.iterdir()) == []  # neither in the run folder nor next to it


@pytest.mark.slow
def test_a_run_on_a_mesh_passes(tmp_path):
    mesh = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    found = examined(tiny(tmp_path, model__dtype="bfloat16", **mesh), "devices", "kernel", "decoding", "collectives")
    assert set(statuses(found).values()) == {"passed"}, found
    # The two ways to compute a gradient differ.
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
def test_a_broken_kernel_is_named(tmp_path, monkeypatch, dtype, break_it):
    whole = IMPLEMENTATIONS["blockwise"]
    monkeypatch.setitem(IMPLEMENTATIONS, "broken", lambda q, k, v, ids: break_it(whole(q, k, v, ids), q, k, v))
    config = tiny(tmp_path, model__dtype=dtype)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="broken"))
    (found,) = examined(config, "kernel").values()
    assert found.status == "failed"
    assert found.seen.startswith("the attention kernel broken is incorrect on cpu") and "set --config" in found.seen
    names = ("values", "dq", "dk", "dv")
    assert set(found.figures) == {f"{kind} of {name}" for kind in ("error", "allowed") for name in names}
    assert any(float(found.figures[f"error of {name}"]) > float(found.figures[f"allowed of {name}"]) for name in names)
    assert json.loads(json.dumps(found.figures, allow_nan=False)) == found.figures


@pytest.mark.slow
def test_decoding_that_is_not_the_forward_pass_is_found(tmp_path, monkeypatch):
    from poly_epo_jax.model import decoding

    true = decoding.cached_attention
    monkeypatch.setattr(decoding, "cached_attention", lambda q, k, v, visible: 0.9 * true(q, k, v, visible))
    # Shapes differ from those that other tests have compiled with the true function.
    (found,) = examined(tiny(tmp_path, base__head_dim=12), "decoding").values()
    assert found.status == "failed"
    assert found.seen.startswith("embedded: log-probabilities differ from the trainer's by ")


@pytest.mark.slow
def test_collectives_that_lose_a_gradient_are_found(tmp_path, monkeypatch):
    true = collectives._gradient

    def gradient(shape, mesh, batch, trainable):
        gradients, loss = true(shape, mesh, batch, trainable)
        # As if one of the devices had added nothing to one weight's sum.
        return gradients | ({"norm": gradients["norm"] * 0.5} if mesh.size > 1 else {}), loss

    monkeypatch.setattr(collectives, "_gradient", gradient)
    (found,) = examined(tiny(tmp_path, mesh__fsdp=2), "collectives").values()
    assert found.status == "failed"
    assert found.seen.startswith("on the mesh the gradient differs from one device's by ")


def test_a_disk_that_gives_other_bits_back_is_found(tmp_path, monkeypatch):
    true = disk._round_trip

    def round_trip(folder, update, state):
        restored, data = true(folder, update, state)
        return dataclasses.replace(restored, updates=restored.updates + 1), data

    monkeypatch.setattr(disk, "_round_trip", round_trip)
    (found,) = examined(tiny(tmp_path), "checkpoint").values()
    assert found.status == "failed" and "came back with other bits" in found.seen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mesh", "complaint"),
    [
        ({"mesh__fsdp": 3}, "mesh.fsdp=3 does not divide the model's hidden_size=16; the nearest mesh that works on 3"),
        ({"mesh__fsdp": 16}, "mesh.data=1, mesh.fsdp=16, mesh.tensor=1 takes 16 devices, but there are 8; the nearest"),
        ({"mesh__device": "h200", "mesh__devices": 8}, "mesh.device=h200, but the available devices are cpu"),
    ],
    ids=["not a divisor", "too many", "other devices"],
)
def test_a_wrong_mesh_is_named_with_the_nearest_one(tmp_path, mesh, complaint):
    found = examined(tiny(tmp_path, **mesh))
    assert found["devices"].status == "failed" and found["devices"].seen.startswith(complaint)
    assert {one.status for name, one in found.items() if name != "devices"} == {"not there"}


def sees(*findings):
    return Check("a check", lambda subject: list(findings), 60.0, "advice", needs_mesh=False)


def raises(error):
    def run(subject):
        raise error

    return Check("a check", run, 60.0, "do this", needs_mesh=False)


@pytest.mark.parametrize(
    ("error", "status", "seen"),
    [
        (Missing("no such thing"), "not there", "no such thing"),
        (Failed("broken; mend it"), "failed", "broken; mend it"),
        (OSError("the disk\n is full; make room"), "failed", "the disk is full; make room"),
        (TimeoutError("of another kind"), "failed", "of another kind"),
        (RuntimeError("INTERNAL: driver"), "failed", "RuntimeError: INTERNAL: driver; do this"),
    ],
)
def test_what_a_check_raises_is_its_finding(tmp_path, error, status, seen):
    (found,) = Examination(Subject(tiny(tmp_path)), 60.0).findings(raises(error))
    assert (found.status, found.seen) == (status, seen)


def test_a_check_that_hangs_is_left_behind(tmp_path):
    hangs = Check("devices", lambda subject: time.sleep(60) or [], 0.1, "see what holds them", needs_mesh=False)
    examination = Examination(Subject(tiny(tmp_path)), 60.0)
    (found,) = examination.findings(hangs)
    assert (found.status, found.seen) == ("failed", "it did not end in 0 s; see what holds them")
    next_one = dataclasses.replace(sees(), needs_mesh=True)
    assert examination.findings(next_one)[0].seen == "the check of devices still holds the devices"
    fine = Finding("a check", "passed", "fine")
    assert examination.findings(sees(fine))[0].status == "passed"


def test_where_one_host_has_no_mesh_the_others_begin_nothing_together(tmp_path, monkeypatch):
    config = dataclasses.replace(tiny(tmp_path), hosts=HostsSection("127.0.0.1:9", 2, 0))

    async def gather(work):
        return [await work] * 2

    monkeypatch.setattr(hosts, "gather", gather)
    together = dataclasses.replace(sees(Finding("a check", "passed", "fine")), needs_mesh=True)
    for others, status in ((True, "passed"), (False, "not there")):
        monkeypatch.setattr(hosts, "on_each", lambda function, others=others: [function(), others])
        (found,) = Examination(Subject(config), 60.0).findings(together)
        assert found.status == status


def test_all_checks_together_have_a_time(tmp_path):
    (found,) = Examination(Subject(tiny(tmp_path)), 0.0).findings(raises(Failed("never called")))
    assert found.status == "not there" and found.seen.startswith("no time was left for it")


@pytest.mark.parametrize(("seconds", "bound", "status"), [(60, 1, "failed"), (40, 1, "passed"), (0.1, 1e-4, "passed")])
def test_a_step_far_from_its_roofline_fails_unless_it_is_tiny(seconds, bound, status):
    found = step._speed([{"name": "gradient", "seconds": float(seconds), "roofline_seconds": float(bound)}])
    assert found.status == status and f"{bound / seconds:.0%} of the roofline" in found.seen


@pytest.mark.parametrize(("fine", "code"), [(True, 0), (False, 1)])
def test_the_table_the_figures_and_the_exit_code(tmp_path, monkeypatch, capsys, fine, code):
    checks = (sees(Finding("one", "passed", "[fine]", {"x": 1.5})), raises(Missing("none") if fine else Failed("bad")))
    monkeypatch.setattr(doctor, "CHECKS", checks)
    config, output = tiny(tmp_path, compilation_cache=COMPILED), tmp_path / "runs" / "doctor.json"
    if code:
        with pytest.raises(SystemExit) as ended:
            doctor.run(config, is_short=True, output=output)
        assert ended.value.code == code
    else:
        doctor.run(config, is_short=True, output=output)
    said = capsys.readouterr().out
    assert "[fine]." in said and f"Doctor: 1 passed, {code} failed, {1 - code} not there." in said
    rows = json.loads(output.read_text())
    assert rows[0]["figures"] == {"x": 1.5} and rows[1]["status"] == ("failed" if code else "not there")
