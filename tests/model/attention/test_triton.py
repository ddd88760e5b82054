import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packings import (
    devices_elsewhere,
    kernel_calls,
    output_and_gradients,
    random_inputs,
    random_packing,
    relative_errors,
    whole_matrix,
)

from poly_epo_jax.model.attention import packed_attention, triton

SMALL_FORWARD = dict.fromkeys((2, 4), triton.Blocks(32, 16, 4))
SMALL_BACKWARD = dict.fromkeys((2, 4), triton.Blocks(32, 16, 4))


def make_attention() -> Callable[..., Any]:
    """Returns a new function, so that its compiled programs include the current patches."""
    return functools.partial(packed_attention, implementation="triton")


TRITON = make_attention()


def compare(
    seed: int, heads: int, kv_heads: int, head_dim: int, dtype: str, limit: float, attend: Any = TRITON
) -> None:
    rng, is_odd = np.random.default_rng(seed), seed % 2
    ids = random_packing(rng, 1 + is_odd, 128 - is_odd)
    inputs = [jnp.asarray(x, dtype) for x in random_inputs(rng, len(ids), ids.shape[1], heads, kv_heads, head_dim)]
    expected = output_and_gradients(whole_matrix, [x.astype(jnp.float32) for x in inputs], ids)
    assert max(relative_errors(output_and_gradients(attend, inputs, ids), expected)) < limit


# The last case is padded, because Triton requires powers of two.
CASES = [
    (4, 2, 64, "float32", 1e-5),
    (3, 3, 128, "float32", 1e-5),
    (4, 1, 128, "bfloat16", 2e-2),
    (6, 2, 24, "float32", 1e-5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "seed"), [(case, index % 2) for index, case in enumerate(CASES)])
def test_triton_matches_the_reference(case, seed: int, monkeypatch):
    monkeypatch.setattr(triton, "FORWARD", SMALL_FORWARD)
    monkeypatch.setattr(triton, "BACKWARD", SMALL_BACKWARD)
    compare(seed, *case)


def off_by_one(keys, first, queries):
    return (keys >= first - 1) & (keys <= queries)


def not_causal(keys, first, queries):
    return keys >= first


@pytest.mark.parametrize("mutant", [off_by_one, not_causal])
def test_an_incorrect_mask_is_detected(mutant, monkeypatch):
    monkeypatch.setattr(triton, "FORWARD", SMALL_FORWARD)
    monkeypatch.setattr(triton, "BACKWARD", SMALL_BACKWARD)
    monkeypatch.setattr(triton, "_visible", mutant)
    with pytest.raises(AssertionError):
        compare(1, *CASES[3], attend=make_attention())


def test_other_sequences_are_not_read(monkeypatch):
    """NaN queries, keys and values would produce NaN in all results that are computed from their blocks."""
    monkeypatch.setattr(triton, "FORWARD", SMALL_FORWARD)
    monkeypatch.setattr(triton, "BACKWARD", SMALL_BACKWARD)
    rng = np.random.default_rng(0)
    q, k, v = random_inputs(rng, 1, 96, 2, 1, 16)
    ids = np.repeat([[1, 2, 3]], 32, axis=1).astype(np.int32)
    for x in (q, k, v):
        x[:, :32] = x[:, 64:] = np.nan
    found = output_and_gradients(TRITON, (q, k, v), ids)
    for x in found:
        assert np.isnan(x[:, :32]).all() and np.isnan(x[:, 64:]).all()
        assert np.isfinite(x[:, 32:64]).all()


def traced_gradient(length: int, dtype: Any, head_dim: int = 128) -> Any:
    shapes = [(1, length, heads, head_dim) for heads in (8, 2, 2)]
    inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with devices_elsewhere("gpu"):
        value = lambda q, k, v, ids: packed_attention(q, k, v, ids).astype(jnp.float32).sum()  # noqa: E731
        return jax.jit(jax.grad(value, argnums=(0, 1, 2))).trace(*inputs, ids)


DEFAULT_IMPLEMENTATIONS = ["forward_kernel", "query_kernel", "key_kernel"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gpu_programs_have_three_kernels_and_no_full_score_matrix(dtype):
    traced = traced_gradient(4096, dtype)
    text = str(traced.jaxpr)
    assert re.findall(r"name=packed_attention_(\w+)", text) == DEFAULT_IMPLEMENTATIONS
    assert "interpret=True" not in text
    assert not re.search(r"\[(\d+,)*4096,4096\]", text)


@pytest.mark.skipif(
    jax.__version_info__ > (0, 10, 2), reason="later versions require the CUDA plugin to lower Triton kernels"
)
def test_the_kernels_lower_for_cuda():
    text = traced_gradient(1024, jnp.bfloat16).lower(lowering_platforms=("cuda",)).as_text()
    assert (
        re.findall(r'name = "packed_attention_(\w+)"', text) == DEFAULT_IMPLEMENTATIONS
        or text.count("xla.gpu.triton") == 3
    )
    assert not re.search(r"tensor<(\d+x)*1024x1024x\w+>", text)


@pytest.mark.parametrize(("remat", "kernels"), [("full", 4), ("attention", 3), ("dots", 3), ("none", 3)])
def test_remat_runs_each_kernel_of_a_layer_only_as_needed(remat: str, kernels: int):
    """Forward, a second forward unless its results are kept, the query gradient, and the key and value gradient."""
    assert kernel_calls(remat, "gpu") == kernels
