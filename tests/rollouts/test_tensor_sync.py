"""Tests `TensorSync` with a fake torch whose copies are asynchronous. test_sglang.py uses real torch and servers."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import TINY, tiny_params

from poly_epo_jax.model import hf
from poly_epo_jax.rollouts.sglang.tensor_sync import TensorSync


class Tensor:
    """Fake GPU tensor. Memory borrowed from JAX is overwritten as soon as the tensor is deleted."""

    is_cuda, device, dtype = True, "cuda:0", "float32"

    def __init__(self, memory: np.ndarray, is_borrowed: bool):
        self.memory, self.is_borrowed, self.shape, self.nbytes = memory, is_borrowed, memory.shape, memory.nbytes

    def __del__(self) -> None:
        if self.is_borrowed:
            self.memory.fill(0xFF)

    def contiguous(self) -> "Tensor":
        return self

    def flatten(self) -> "Tensor":
        return self

    def view(self, dtype: str) -> "Tensor":
        return self

    def numel(self) -> int:
        return self.nbytes


class Torch:
    """Fake torch that queues copies and executes them in `synchronize`."""

    uint8 = "uint8"

    def __init__(self) -> None:
        self.queue: list[tuple[np.ndarray, np.ndarray]] = []
        self.cuda = SimpleNamespace(synchronize=self.synchronize)

    def from_dlpack(self, array: Any) -> Tensor:
        return Tensor(np.array(array).reshape(-1).view(np.uint8), is_borrowed=True)

    def cat(self, parts: list[Tensor]) -> Tensor:
        copy = np.zeros(sum(part.nbytes for part in parts), np.uint8)
        start = 0
        for part in parts:
            self.queue.append((copy[start : start + part.nbytes], part.memory))
            start += part.nbytes
        return Tensor(copy, is_borrowed=False)

    def synchronize(self, device: str) -> None:
        assert device == "cuda:0"
        while self.queue:
            target, source = self.queue.pop(0)
            target[:] = source


def test_copies_are_complete_before_jax_reuses_its_memory(monkeypatch):
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    sync = TensorSync(TINY, "float32", tensor_parallel=1)
    sync.prepare(tiny_params(1), "1")
    sync.switch()
    torch.synchronize("cuda:0")  # The queue also runs eventually without a call of `synchronize`.
    (bucket,) = sync._buckets
    expected = [array for _, array in hf.exported_tensors(tiny_params(1), TINY, "float32")]
    expected = np.concatenate([np.array(array).reshape(-1).view(np.uint8) for array in expected])
    np.testing.assert_array_equal(bucket["flattened_tensor"].memory, expected)


def test_the_error_without_torch_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install torch, or set rollouts\.weight_sync=disk"):
        TensorSync(TINY, "float32", tensor_parallel=1)
