"""The peak memory of training is reported where the system provides it."""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from poly_epo_jax.parallel import peak_memory
from poly_epo_jax.parallel.peak_memory import device_peak, peak_bytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells it")
def test_on_a_cpu_it_is_that_of_the_process():
    before = peak_bytes()
    assert before is not None and device_peak() is None
    array = np.ones(before // 8 + 25_000_000)  # 200 MB more than was ever held
    held = peak_bytes()
    assert held is not None and held > array.nbytes
    del array
    after = peak_bytes()
    assert after is not None and after > 0.99 * held  # Linux counts pages a few at a time


def test_of_devices_it_is_that_of_the_fullest(monkeypatch: pytest.MonkeyPatch):
    def devices(*stats: dict[str, int] | None) -> None:
        found = [SimpleNamespace(platform="gpu", memory_stats=lambda own=own: own) for own in stats]
        monkeypatch.setattr(jax, "local_devices", lambda: found)

    devices({"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7})
    assert peak_bytes() == device_peak() == 7
    devices({"peak_bytes_in_use": 5}, None)
    assert peak_bytes() is None


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(peak_memory, "STATUS", tmp_path / "status")
    assert peak_bytes() is None
