import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.model import attention
from poly_epo_jax.model.attention import self_check, triton
from poly_epo_jax.model.attention.self_check import AttentionCheck, check_attention, verify_attention_kernel
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.parallel.sharding import make_mesh

SHAPE = ModelConfig(32, 32, 32, 1, 4, 2, 16, dtype="float32")


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    """Registers a copy of the blockwise implementation as the kernel of this machine, and reduces the test case."""
    monkeypatch.setattr(self_check, "SEGMENTS", ((1, 30, 70, 6, 60, 30), (200,)))
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", dict(attention.IMPLEMENTATIONS))
    monkeypatch.setattr(attention, "disabled_kernels", set())
    break_kernel(monkeypatch, lambda attend: attend)


def break_kernel(monkeypatch, change) -> None:
    """Makes "auto" select the blockwise implementation with a modification."""
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "copy", change(attention.IMPLEMENTATIONS["blockwise"]))
    monkeypatch.setattr(attention, "DEFAULT_IMPLEMENTATIONS", {"cpu": "copy"})


def without_segments(attend):
    def changed(q, k, v, segments):
        return attend(q, k, v, dataclasses.replace(segments, first=0 * segments.first))

    return changed


def one_key_too_few(attend):
    def changed(q, k, v, segments):
        position = jnp.arange(segments.first.shape[1])[None]
        return attend(q, k, v, dataclasses.replace(segments, first=jnp.minimum(segments.first + 1, position)))

    return changed


def wrong_gradient(attend):
    @jax.custom_vjp
    def changed(q, k, v, segments):
        return attend(q, k, v, segments)

    def backward(inputs, d_out):
        d_q, d_k, d_v = jax.vjp(lambda *x: attend(*x, inputs[3]), *inputs[:3])[1](d_out)
        return d_q, 0.9 * d_k, d_v, None

    changed.defvjp(lambda *inputs: (attend(*inputs), inputs), backward)
    return changed


def slightly_too_large(attend):
    return lambda *inputs: 1.0001 * attend(*inputs)


def raises(attend):
    def changed(q, k, v, segments):
        raise NotImplementedError("sm_52 has no such instruction\nand a long trace")

    return changed


def check() -> AttentionCheck:
    return check_attention("copy", make_mesh(1, 1, 1), SHAPE)


@pytest.fixture
def passing(monkeypatch) -> list[str]:
    """Replaces the comparison by one that every kernel passes. Returns the names of the compared kernels."""
    compared = []

    def check_attention(implementation, mesh, config):
        compared.append(implementation)
        return AttentionCheck(implementation, "cpu", {"values": (1e-7, 1e-6)})

    monkeypatch.setattr(self_check, "check_attention", check_attention)
    return compared


def trust(tmp_path: Path, requested: str = "auto") -> None:
    verify_attention_kernel(requested, SHAPE, make_mesh(1, 1, 1), tmp_path / "compiled" / "attention.json")


def test_a_correct_kernel_passes():
    found = check()
    assert found.passed and all(0 < error < limit < 1e-4 for error, limit in found.errors.values())
    assert str(found).startswith("the attention kernel copy is correct on cpu: relative errors (limits) are values ")


@pytest.mark.parametrize("broken", [one_key_too_few, wrong_gradient])
def test_an_incorrect_kernel_fails(broken, monkeypatch):
    break_kernel(monkeypatch, broken)
    found = check()
    assert not found.passed and not found.error
    assert (found.errors["values"][0] < 1e-5) == (broken is wrong_gradient)


def test_a_kernel_that_does_not_run_reports_the_error(monkeypatch):
    break_kernel(monkeypatch, raises)
    assert str(check()) == "the attention kernel copy does not run on cpu (sm_52 has no such instruction)"


def test_nan_is_an_infinite_error(monkeypatch):
    break_kernel(monkeypatch, lambda attend: lambda *inputs: np.nan * attend(*inputs))
    assert check().errors["values"][0] == np.inf


@pytest.mark.parametrize("broken", [without_segments, slightly_too_large])
def test_auto_disables_an_incorrect_kernel_with_a_warning(tmp_path, monkeypatch, capsys, broken):
    break_kernel(monkeypatch, broken)
    trust(tmp_path)
    assert attention.resolve_implementation("auto") == "blockwise" and attention.disabled_kernels == {"copy"}
    printed = capsys.readouterr().err
    assert printed.startswith("Warning: the attention kernel copy is incorrect on cpu: ") and printed.count("\n") == 1
    errors = re.findall(r"(\w+) (\d\.\de[-+]\d+) \((\d\.\de[-+]\d+)\)", printed)
    assert [name for name, *_ in errors] == ["values", "dq", "dk", "dv"]
    assert any(float(error) > float(limit) for _, error, limit in errors) and "blockwise" in printed
    if broken is slightly_too_large:
        assert all(float(limit) < float(error) == pytest.approx(1e-4, rel=0.1) for _, error, limit in errors)
    assert not (tmp_path / "compiled").exists()


def test_an_incorrect_kernel_requested_by_name_is_rejected(tmp_path, monkeypatch):
    wrong = AttentionCheck("copy", "cpu", {"values": (0.5, 1e-6)})
    monkeypatch.setattr(self_check, "check_attention", lambda *_: wrong)
    with pytest.raises(
        ConfigError,
        match=r"^model.attention=copy: the attention kernel copy is incorrect on .*; set model.attention=auto",
    ):
        trust(tmp_path, "copy")


def test_passed_checks_are_cached_until_a_version_changes(tmp_path, passing, monkeypatch):
    trust(tmp_path)
    trust(tmp_path)  # reads the cache
    assert passing == ["copy"]
    broken = AttentionCheck("copy", "cpu", {}, "no such instruction")
    monkeypatch.setattr(self_check, "check_attention", lambda *_: broken)
    trust(tmp_path)
    assert attention.resolve_implementation("auto") == "copy"
    with monkeypatch.context() as newer:
        newer.setattr(jax, "__version__", "99")
        trust(tmp_path)
    assert attention.resolve_implementation("auto") == "blockwise"


@pytest.mark.parametrize("content", ["", "[]", '{"copy": '])
def test_a_corrupted_cache_is_ignored(tmp_path, passing, content):
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "attention.json").write_text(content)
    trust(tmp_path)
    assert passing == ["copy"]
    assert attention.resolve_implementation("auto") == "copy"


def test_a_kernel_without_support_for_windows_is_not_used(tmp_path, capsys):
    windowed = dataclasses.replace(SHAPE, windows=(0, 64))
    with pytest.raises(ConfigError, match=r"attention=splash does not support .* windows"):
        verify_attention_kernel("splash", windowed, make_mesh(1, 1, 1), tmp_path / "attention.json")
    verify_attention_kernel("auto", windowed, make_mesh(1, 1, 1), tmp_path / "attention.json")  # Not an added kernel.
    assert "Warning: copy attention does not support sliding windows; using blockwise." in capsys.readouterr().err


def test_blockwise_is_not_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(self_check, "check_attention", None)
    trust(tmp_path, "blockwise")


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(0,), (0, 64)])
def test_the_interpreted_triton_kernel_passes(windows, monkeypatch):
    monkeypatch.setattr(triton, "FORWARD", {4: triton.Blocks(32, 16, 4)})
    monkeypatch.setattr(triton, "BACKWARD", {4: triton.Blocks(32, 16, 4)})
    assert check_attention("triton", make_mesh(1, 1, 1), dataclasses.replace(SHAPE, windows=windows)).passed
