"""Checks that an attention kernel computes what the plain form computes, on the very device that it will run on.

A changed compiler, driver or internal interface can make a kernel wrong without any error, and training with it would
look like a poor learning rate. The test case is small, and checks that have passed are remembered.
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
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float, Int

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.model import attention
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.rounding import allowed, exactly
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.mesh import AXES
from poly_epo_jax.parallel.sharding import row_sharding
from poly_epo_jax.system.file_lock import exclusive
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.system.text import first_line

CHECKED = "attention.json"
"""The file in the folder of compiled programs that records which checks have passed."""

# The segments of a row of packed sequences, followed by padding; and a row that is one sequence. They begin and end
# inside blocks, and whole blocks are skipped, whatever the kernel's blocks.
SEGMENTS = ((1, 100, 413, 6, 250, 300), (1280,))


@dataclasses.dataclass(frozen=True)
class AttentionCheck:
    """By how much a kernel's values and gradients differ from those of the definition in float32.

    Attributes:
      errors: by name, the largest relative error of a token, and the largest that rounding allows.
      error: why the kernel cannot be run; empty if it can.
    """

    implementation: str
    device: str
    errors: Mapping[str, tuple[float, float]]
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and all(found <= most for found, most in self.errors.values())

    def __str__(self) -> str:
        if self.error:
            return f"the attention kernel {self.implementation} does not run on {self.device} ({self.error})"
        listed = ", ".join(f"{name} {found:.1e} of {most:.1e}" for name, (found, most) in self.errors.items())
        verdict = "is right" if self.passed else "is wrong"
        name = f"the attention kernel {self.implementation}"
        return f"{name} {verdict} on {self.device}: relative errors, of allowed: {listed}"


def check_attention(implementation: str, mesh: Mesh, shape: ModelConfig) -> AttentionCheck:
    """Runs a key of attention.IMPLEMENTATIONS on a mesh, with the heads and types of a model."""
    length, kv_heads = max(map(sum, SEGMENTS)), 2 * mesh.shape["tensor"]
    ids = np.array([np.repeat([*range(1, len(r) + 1), 0], [*r, length - sum(r)]) for r in SEGMENTS], np.int32)
    ids = np.tile(ids, (mesh.shape["data"] * mesh.shape["fsdp"], 1))
    rng, heads, real = (
        np.random.default_rng(0),
        shape.num_heads // shape.num_kv_heads * kv_heads,
        (ids > 0)[..., None, None],
    )
    draws = [
        rng.standard_normal((*ids.shape, n, shape.head_dim), np.float32) for n in (heads, kv_heads, kv_heads, heads)
    ]

    def results(attend: Callable[..., jax.Array], dtype: str) -> list[np.ndarray]:
        @jax.jit
        def run(q, k, v, d_out):
            out, pullback = jax.vjp(functools.partial(attend, segment_ids=jnp.asarray(ids)), q, k, v)
            return jnp.where(real, out, 0), *pullback(d_out * real)

        inputs = (jax.device_put(x.astype(dtype), row_sharding(mesh)) for x in draws)
        return [np.asarray(x, np.float32) for x in jax.device_get(run(*inputs))]

    kind = mesh.devices.flat[0].device_kind
    with jax.set_mesh(mesh):
        with exactly():
            exact = results(plain_attention, "float32")
        rough = results(plain_attention, shape.dtype)
        try:
            kernel = functools.partial(attention.packed_attention, implementation=implementation)
            found = results(kernel, shape.dtype)
        except Exception as error:  # whatever a compiler raises, this kernel is not to be used
            return AttentionCheck(implementation, kind, {}, first_line(error))
    pairs = zip(("values", "dq", "dk", "dv"), found, rough, exact, strict=True)
    return AttentionCheck(
        implementation, kind, {name: (_error(x, z), allowed(_error(y, z))) for name, x, y, z in pairs}
    )


def plain_attention(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T H D"]:
    """`packed_attention` by its definition, with the whole [T, T] scores."""
    place = jnp.arange(segment_ids.shape[1])
    visible = (segment_ids[:, :, None] == segment_ids[:, None]) & (place[:, None] >= place[None])[None]
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """The error of the worst token and head; for small vectors, relative to the root mean square of all."""
    norms = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(found - expected, axis=-1) / np.maximum(norms, np.sqrt(np.mean(norms**2)))
    return float(np.max(errors)) if np.isfinite(errors).all() else np.inf


def trust_attention(asked: str, shape: ModelConfig, mesh: Mesh, cache: Path) -> None:
    """Checks on every host the kernel that `asked`, the value of model.attention, selects on a mesh.

    With "auto", a kernel that fails is not used from here on, and a warning says so. Checks that have passed are kept
    in `cache`, a JSON file, for each kernel, device, shape of heads and version of the libraries.

    Raises:
      ConfigError: a kernel that was requested by name fails.
    """
    with jax.set_mesh(mesh):
        implementation = attention.fastest(asked)
    if implementation == "blockwise":
        return
    checks = hosts.on_each(lambda: _remembered_check(implementation, mesh, shape, cache))
    failed = next((check for check in checks if not check.passed), None)
    if failed is None:
        return
    if asked != "auto":
        raise ConfigError(f"model.attention={asked}: {failed}; set model.attention=auto or blockwise, the plain form.")
    attention.distrusted.add(implementation)
    if hosts.is_first():
        print(f"Warning: {failed}; the plain form is used, which is much slower.", file=sys.stderr)


def _remembered_check(implementation: str, mesh: Mesh, shape: ModelConfig, cache: Path) -> AttentionCheck:
    device = mesh.local_devices[0]
    name = " ".join(
        [
            f"{implementation} {shape.num_heads}:{shape.num_kv_heads}x{shape.head_dim} {shape.dtype}",
            f"{device.device_kind} {' '.join(device.client.platform_version.split())}",
            f"jax {jax.__version__} jaxlib {importlib.metadata.version('jaxlib')}",
        ]
    )
    if name in _read(cache):
        return AttentionCheck(implementation, device.device_kind, {})
    alone = Mesh(np.array([[[device]]]), AXES, axis_types=(AxisType.Auto,) * 3)
    check = check_attention(implementation, alone, shape)
    if check.passed:
        # Every host of a run writes it, and other runs do.
        with exclusive(cache.with_suffix(".lock"), f"the file {cache}", wait=True):
            write_json(cache, _read(cache) | {name: check.errors})
    return check


def _read(cache: Path) -> dict[str, Any]:
    """The errors of each check by its name; a file that is missing or damaged is written anew."""
    try:
        return dict(json.loads(cache.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return {}
