"""Random packed rows, reference attention, and tracing for devices that are not available."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.mesh import AXES

KINDS = {"cpu": "cpu", "gpu": "NVIDIA H200", "tpu": "TPU v5p"}


def devices_elsewhere(platform: str) -> AbstractContextManager[Any]:
    """Returns a context in which functions are traced for one device of the given platform."""
    device = AbstractDevice(KINDS[platform], None if platform == "gpu" else 1, platform)
    mesh = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def random_packing(
    rng: np.random.Generator, rows: int, length: int, mean: float = 0.0, longest: int | None = None
) -> np.ndarray:
    """Creates segment ids [rows, length] with exponentially distributed segment lengths, followed by padding.

    Args:
      rng: Random generator.
      rows: Number of rows.
      length: Length of a row, in tokens.
      mean: Mean segment length. 0 chooses one of several scales for each row.
      longest: Maximum segment length. None does not limit it.
    """
    segment_ids = np.zeros((rows, length), np.int32)
    for row in segment_ids:
        scale = mean or length / rng.choice([1, 4, 30])
        start, segment, end = 0, 1, length - rng.integers(0, length // 4 + 1)
        while start < end:
            size = min(1 + int(rng.exponential(scale)), longest or length, length - start)
            row[start : start + size] = segment
            start, segment = start + size, segment + 1
    return segment_ids


def shared_packing(rng: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Creates segment ids and positions of prompts with random lengths and up to five segments that continue each."""
    segment_ids, positions = np.zeros((2, rows, length), np.int32)
    for ids, token_positions in zip(segment_ids, positions, strict=True):
        at, segment = 0, 0
        while at < length - 2:
            shared = int(rng.integers(1, length // 3))
            for start in (0, *[shared] * rng.integers(0, 6)):
                size = min(int(rng.integers(1, 9)) if start else shared, length - at)
                segment += 1
                ids[at : at + size], token_positions[at : at + size] = segment, start + np.arange(size)
                at += size
    return segment_ids, positions


def visible_where_shared(segment_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns `visible`, extended by shared prompts.

    A segment that starts at position p > 0 also attends to the first p tokens of the nearest preceding segment that
    starts at position 0.
    """
    seen = visible(segment_ids)
    for b, t in np.argwhere(segment_ids > 0):
        first = t
        while first and segment_ids[b, first - 1] == segment_ids[b, t]:
            first -= 1
        prompt = first
        while positions[b, prompt]:
            prompt -= 1
        seen[b, t, prompt : prompt + positions[b, first]] = True
    return seen


def visible(segment_ids: Any) -> Any:
    """Returns the attention mask [B, T, S]: earlier tokens of the same segment. Padding only attends to itself."""
    position = np.arange(segment_ids.shape[1])
    same = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids > 0)[:, :, None]
    causal = (position[:, None] >= position)[None]
    return (same & causal) | (position[:, None] == position)[None]


def whole_matrix(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: Any, seen: Any = None) -> jax.Array:
    """Computes reference attention with one matrix of scores, which JAX differentiates.

    Args:
      q: Queries [B, T, heads, head_dim].
      k: Keys [B, T, kv_heads, head_dim].
      v: Values [B, T, kv_heads, head_dim].
      segment_ids: Segment ids [B, T].
      seen: Attention mask [B, T, T]. If None, it is `visible(segment_ids)`.
    """
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where((visible(segment_ids) if seen is None else seen)[:, None], scores, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def random_inputs(
    rng: np.random.Generator, rows: int, length: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[np.ndarray, ...]:
    """Creates random queries, keys and values."""
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


def output_and_gradients(
    attend: Callable[..., Any], inputs: Sequence[Any], segment_ids: np.ndarray, *others: Any
) -> list[Any]:
    """The output, and the gradients of a random linear function of its real tokens.

    Packings of one shape share a program, as long as they share `attend`.

    Args:
      attend: Function of queries, keys, values, segment ids and `others`.
      inputs: Queries, keys and values.
      segment_ids: Segment ids [B, T].
      others: Further arrays that `attend` receives.
    """
    weights = np.random.default_rng(1).standard_normal(inputs[0].shape, np.float32)
    weights *= (segment_ids > 0)[:, :, None, None]
    (_, out), gradients = _program(attend)(*inputs, jnp.asarray(segment_ids), weights, *others)
    return [out * (segment_ids > 0)[:, :, None, None], *gradients]


@functools.cache
def _program(attend: Callable[..., Any]) -> Callable[..., Any]:
    def value(q, k, v, segment_ids, weights, *others):
        out = attend(q, k, v, segment_ids, *others)
        return jnp.sum(out * weights), out

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))


def relative_errors(found: Sequence[Any], expected: Sequence[Any]) -> list[float]:
    """Returns |found - expected| / |expected| for each array."""
    pairs = [(np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in zip(found, expected, strict=True)]
    return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs]


def kernel_calls(remat: str, platform: str) -> int:
    """Returns the number of kernel calls in the gradient of one layer, for one row on a device of `platform`."""
    shape = ModelConfig(32, 64, 64, 2, 2, 1, 64, dtype="bfloat16", remat=remat)
    model_def, state = nnx.split(abstract_model(shape))
    ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

    def value(state, ids):
        return nnx.merge(model_def, state)(ids, ids, ids).astype(jnp.float32).sum()

    with devices_elsewhere(platform):
        traced = jax.jit(jax.grad(value)).trace(state, ids)
    jaxpr = traced.jaxpr.jaxpr
    return live_kernels(jaxpr, [True] * len(jaxpr.outvars))


def live_kernels(jaxpr: Any, wanted: Sequence[bool]) -> int:
    """Counts kernel calls whose results are used. Remat creates unused calls, which the compiler removes."""
    used, count = {id(x) for x, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted}, 0
    for equation in reversed(jaxpr.eqns):
        is_used = [id(x) in used for x in equation.outvars]
        if not any(is_used):
            continue
        used |= {id(x) for x in equation.invars}
        if equation.primitive.name == "pallas_call":
            count += 1
            continue
        for inner in (getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(equation.params.values()))):
            if hasattr(inner, "eqns") and len(inner.outvars) == len(is_used):
                all_used = equation.primitive.name == "scan"  # a carried value is used by the next iteration
                count += live_kernels(inner, [all_used or x for x in is_used])
    return count
