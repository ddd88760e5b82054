"""Tests the error messages for platforms that JAX cannot use."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.parallel.devices import find_devices
from poly_epo_jax.system.missing_packages import install_command

ROOT = Path(__file__).parents[2]
SCRIPT = """
from poly_epo_jax import get_config, run
config = get_config("polynomial")
config.workdir = "run"
for _ in range(2):
    try:
        run(config)
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platforms", "remedy"),
    [
        ("cuda", f"unset it or, on a machine with such devices, run: {install_command('gpu')}."),
        ("tpu", f"unset it or, on a machine with such devices, run: {install_command('tpu')}."),
        ("another", "unset it."),
    ],
)
def test_a_platform_without_devices(tmp_path: Path, platforms: str, remedy: str):
    """A second run in the same process reports the same error, and does not use another platform."""
    variables = {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": "", "TPU_SKIP_MDS_QUERY": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=os.environ | variables | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    first, second = ended.stdout.splitlines()
    assert first == second and not list(tmp_path.iterdir()), ended.stderr
    assert first == f"JAX_PLATFORMS={platforms} cannot be used, because JAX only finds cpu here; {remedy}"


def test_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda': no driver\nsecond line")

    monkeypatch.setattr(jax, "devices", fail)
    jax.config.update("jax_platforms", "")
    with pytest.raises(ConfigError, match=r"cannot use the devices .*: Unable .* 'cuda': no driver$"):
        find_devices()
    jax.config.update("jax_platforms", "cpu")
