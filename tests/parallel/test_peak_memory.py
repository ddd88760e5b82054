"""Tests the peak memory of devices and processes."""

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from poly_epo_jax.parallel import devices as peak_memory
from poly_epo_jax.parallel.devices import device_peak, peak_bytes

SIZE = 200_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="requires /proc of Linux")
def test_cpu_peak_is_that_of_the_process():
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of earlier tests
    before = peak_bytes()
    assert before is not None and device_peak() is None
    with mmap.mmap(-1, SIZE) as pages:
        np.frombuffer(pages, np.uint8)[:] = 1
        held = peak_bytes()
    assert held is not None and held > before + 0.9 * SIZE  # Other threads may free memory at the same time.
    after = peak_bytes()
    assert after is not None and after > 0.99 * held  # Linux updates page counts in batches.


def test_device_peak_is_the_maximum_over_devices(monkeypatch: pytest.MonkeyPatch):
    def devices(*stats: dict[str, int] | None) -> None:
        found = [SimpleNamespace(platform="gpu", memory_stats=lambda own=own: own) for own in stats]
        monkeypatch.setattr(jax, "local_devices", lambda: found)

    devices({"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7})
    assert peak_bytes() == device_peak() == 7
    devices({"peak_bytes_in_use": 5}, None)
    assert peak_bytes() is None


def test_peak_is_none_if_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(peak_memory, "STATUS", tmp_path / "status")
    assert peak_bytes() is None
