"""Compares attention kernels with a reference implementation on the device that they will run on.

A new compiler, driver or internal interface can make a kernel incorrect without an error, and the effect on training
would resemble a bad learning rate. The test case is small, and passed checks are cached.
"""

import dataclasses
import functools
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.model import attention
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.rounding import exact_matmuls, tolerance_of
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.mesh import row_shards
from poly_epo_jax.parallel.sharding import make_mesh, row_sharding
from poly_epo_jax.system.file_lock import lock_file
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.system.text import first_line

CHECKED = "attention.json"
"""File name of the cache of passed checks, in the directory of the compilation cache."""

# Segment lengths of two rows: packed sequences followed by padding, and a single sequence. For all block sizes of the
# kernels, segments start and end within blocks, and some blocks are skipped.
SEGMENTS = ((1, 100, 413, 6, 250, 300), (1280,))
WINDOW = 50  # Window in tokens for models with windows. It starts within blocks.


@dataclasses.dataclass(frozen=True)
class AttentionCheck:
    """Result of comparing a kernel with the float32 reference implementation.

    Attributes:
      implementation: Key of attention.IMPLEMENTATIONS.
      device: Device kind, as reported by JAX.
      errors: Largest relative error of a token and its limit, keyed by array name (`values`, `dq`, `dk`, `dv`). Empty
        if the kernel does not run, or if a passed check was found in the cache.
      error: Reason why the kernel does not run. Empty if it runs.
    """

    implementation: str
    device: str
    errors: Mapping[str, tuple[float, float]]
    error: str = ""

    @property
    def passed(self) -> bool:
        """True if the kernel runs and all errors are within their limits."""
        return not self.error and all(found <= limit for found, limit in self.errors.values())

    def __str__(self) -> str:
        if self.error:
            return f"the attention kernel {self.implementation} does not run on {self.device} ({self.error})"
        listed = ", ".join(f"{name} {found:.1e} ({limit:.1e})" for name, (found, limit) in self.errors.items())
        verdict = "is correct" if self.passed else "is incorrect"
        name = f"the attention kernel {self.implementation}"
        return f"{name} {verdict} on {self.device}: relative errors (limits) are {listed}"


def check_attention(implementation: str, mesh: Mesh, config: ModelConfig) -> AttentionCheck:
    """Compares an attention implementation with the reference implementation on a mesh.

    Args:
      implementation: Key of attention.IMPLEMENTATIONS.
      mesh: Mesh to run on.
      config: Model configuration, which defines the head width, the query heads per key head and the compute
        type.

    Returns:
      The errors of values and gradients, or the reason why the implementation does not run.
    """
    length, kv_heads = max(map(sum, SEGMENTS)), 2 * mesh.shape["tensor"]
    ids = np.array([np.repeat([*range(1, len(r) + 1), 0], [*r, length - sum(r)]) for r in SEGMENTS], np.int32)
    ids = np.tile(ids, (row_shards(mesh.shape), 1))
    rng, heads, real = (
        np.random.default_rng(0),
        config.num_heads // config.num_kv_heads * kv_heads,
        (ids > 0)[..., None, None],
    )
    draws = [
        rng.standard_normal((*ids.shape, n, config.head_dim), np.float32) for n in (heads, kv_heads, kv_heads, heads)
    ]

    def results(attend: Callable[..., jax.Array], dtype: str) -> list[np.ndarray]:
        @jax.jit
        def run(q, k, v, d_out):
            out, pullback = jax.vjp(functools.partial(attend, segment_ids=jnp.asarray(ids)), q, k, v)
            return jnp.where(real, out, 0), *pullback(d_out * real)

        inputs = (jax.device_put(x.astype(dtype), row_sharding(mesh)) for x in draws)
        return [np.asarray(x, np.float32) for x in jax.device_get(run(*inputs))]

    kind = mesh.devices.flat[0].device_kind
    window = WINDOW if any(config.windows) else 0
    reference = functools.partial(reference_attention, window=window)
    with jax.set_mesh(mesh):
        with exact_matmuls():
            exact = results(reference, "float32")
        rounded = results(reference, config.dtype)
        try:
            kernel = functools.partial(attention.packed_attention, implementation=implementation, window=window)
            found = results(kernel, config.dtype)
        except Exception as error:  # Compilers raise many types of errors. In all cases, the kernel cannot be used.
            return AttentionCheck(implementation, kind, {}, first_line(error))
    return AttentionCheck(
        implementation,
        kind,
        {
            name: (_error(x, z), tolerance_of(_error(y, z)))
            for name, x, y, z in zip(("values", "dq", "dk", "dv"), found, rounded, exact, strict=True)
        },
    )


def reference_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segment_ids: Int[Array, "B T"],
    window: int = 0,
) -> Float[Array, "B T H D"]:
    """Implements `packed_attention` with the full [T, T] score matrix, as a reference.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      segment_ids: Segment of each token. Padding (id 0) also sees earlier padding, so its outputs must be ignored.
      window: Number of tokens that a token sees, including itself. 0 disables the window.

    Returns:
      The outputs of all query heads.
    """
    index = jnp.arange(segment_ids.shape[1])
    visible = (segment_ids[:, :, None] == segment_ids[:, None]) & (index[:, None] >= index[None])[None]
    visible &= (index[:, None] - index[None] < window)[None] if window else True
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest relative error over tokens and heads.

    The error of a vector is relative to its norm or to the root mean square of all norms, whichever is larger.
    """
    norms = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(found - expected, axis=-1) / np.maximum(norms, np.sqrt(np.mean(norms**2)))
    return float(np.max(errors)) if np.isfinite(errors).all() else np.inf


def verify_attention_kernel(requested: str, config: ModelConfig, mesh: Mesh, cache: Path) -> None:
    """Verifies on every process the attention kernel that `model.attention` selects.

    If the kernel that "auto" selects fails on any process, it is disabled with a warning.

    Args:
      requested: Value of `model.attention`.
      config: Model configuration.
      mesh: Mesh of the run.
      cache: JSON file of passed checks, keyed by kernel, heads, compute type, device and library versions.

    Raises:
      ConfigError: If a kernel that was requested by name fails.
    """
    has_window = any(config.windows)
    if has_window and requested not in ("auto", *attention.SUPPORTS_WINDOWS):
        raise ConfigError(
            f"model.attention={requested} does not support the sliding windows of this model; set model.attention=auto."
        )
    with jax.set_mesh(mesh):
        implementation, fastest = (attention.resolve_implementation(requested, case) for case in (has_window, False))
    if implementation != fastest and hosts.is_first():
        print(f"Warning: {fastest} attention does not support sliding windows; using blockwise.", file=sys.stderr)
    if implementation == "blockwise":
        return
    checks = hosts.gather_from_all(lambda: _cached_check(implementation, mesh, config, cache))
    failed = next((check for check in checks if not check.passed), None)
    if failed is None:
        return
    if requested != "auto":
        raise ConfigError(f"model.attention={requested}: {failed}; set model.attention=auto or blockwise.")
    attention.disabled_kernels.add(implementation)
    if hosts.is_first():
        print(f"Warning: {failed}; using the much slower blockwise implementation instead.", file=sys.stderr)


def _cached_check(implementation: str, mesh: Mesh, config: ModelConfig, cache: Path) -> AttentionCheck:
    device = mesh.local_devices[0]
    name = " ".join(
        [
            f"{implementation}{' with a window' * any(config.windows)}",
            f"{config.num_heads}:{config.num_kv_heads}x{config.head_dim} {config.dtype}",
            f"{device.device_kind} {' '.join(device.client.platform_version.split())}",
            f"jax {jax.__version__} jaxlib {importlib.metadata.version('jaxlib')}",
        ]
    )
    if name in _read_cache(cache):
        return AttentionCheck(implementation, device.device_kind, {})
    check = check_attention(implementation, make_mesh(1, 1, 1, available=[device]), config)
    if check.passed:
        # The other processes of this run and other runs may write the file concurrently.
        with lock_file(cache.with_suffix(".lock"), f"the file {cache}", wait=True):
            write_json(cache, _read_cache(cache) | {name: check.errors})
    return check


def _read_cache(cache: Path) -> dict[str, Any]:
    """Reads the errors of passed checks, keyed by check. Returns {} if the file is missing or corrupted."""
    try:
        return dict(json.loads(cache.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return {}
