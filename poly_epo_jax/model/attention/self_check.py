"""Checks that an attention kernel computes what the plain form computes, on the very device that it will run on.

A changed compiler, driver or internal interface can make a kernel wrong without any error, and training with it would
look like a poor learning rate. The test case is small, and checks that have passed are remembered.
"""

import dataclasses
import functools
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from poly_epo_jax.config import ConfigError
from poly_epo_jax.file_lock import exclusive
from poly_epo_jax.first_line import first_line
from poly_epo_jax.json_files import write_json
from poly_epo_jax.model import attention
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.mesh import AXES

CHECKED = "attention.json"
"""The file in the folder of compiled programs that records which checks have passed."""

# The segments of a row of packed sequences, followed by padding; and a row that is one sequence. They begin and end
# inside blocks, and whole blocks are skipped, whatever the kernel's blocks.
SEGMENTS = ((1, 100, 413, 6, 250, 300), (1280,))
# The largest relative error of a token: above the error from rounding to 8 bits, or to 11 as in TF32, in which GPUs
# multiply float32; below the error from one key too many or too few in a sequence of 250 tokens, 0.06.
TOLERANCE = {"bfloat16": 0.04, "float16": 0.01, "float32": 0.01}


@dataclasses.dataclass(frozen=True)
class AttentionCheck:
    """By how much a kernel's values and gradients differ from those of the plain form in float32.

    Attributes:
      values, gradients: the largest relative error of a token; infinite if the kernel cannot be run.
      tolerance: the limit for both.
      error: why the kernel cannot be run; empty if it can.
    """

    implementation: str
    device: str
    values: float
    gradients: float
    tolerance: float
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.values <= self.tolerance and self.gradients <= self.tolerance

    def __str__(self) -> str:
        if self.error:
            return f"the attention kernel {self.implementation} does not run on {self.device} ({self.error})"
        verdict = "is right" if self.passed else "is wrong"
        return (
            f"the attention kernel {self.implementation} {verdict} on {self.device}: relative errors of values "
            f"{self.values:.1e} and of gradients {self.gradients:.1e}, where {self.tolerance:g} is allowed"
        )


def check_attention(implementation: str, device: Any, shape: ModelConfig) -> AttentionCheck:
    """Runs a key of attention.IMPLEMENTATIONS on a jax.Device, with the heads and types of a model."""
    rows, length = len(SEGMENTS), max(map(sum, SEGMENTS))
    ids = np.zeros((rows, length), np.int32)
    for row, sizes in zip(ids, SEGMENTS, strict=True):
        row[: sum(sizes)] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
    rng, heads = np.random.default_rng(0), (2 * shape.num_heads // shape.num_kv_heads, 2, 2)
    draws = [rng.standard_normal((rows, length, n, shape.head_dim), np.float32) for n in (*heads, heads[0])]
    q, k, v, d_out = (jnp.asarray(x, shape.dtype) for x in draws)
    d_out *= (ids > 0)[:, :, None, None]

    def results(implementation: str, *inputs: jax.Array) -> list[np.ndarray]:
        def run(q, k, v, d_out):
            attend = functools.partial(
                attention.packed_attention, segment_ids=jnp.asarray(ids), implementation=implementation
            )
            out, pullback = jax.vjp(attend, q, k, v)
            return jnp.where((ids > 0)[:, :, None, None], out, 0), *pullback(d_out)

        return [np.asarray(x, np.float32) for x in jax.device_get(jax.jit(run)(*inputs))]

    device_mesh = Mesh(np.array([[[device]]]), AXES, axis_types=(AxisType.Auto,) * 3)
    kind, tolerance = device.device_kind, TOLERANCE[shape.dtype]
    with jax.set_mesh(device_mesh):
        with jax.default_matmul_precision("float32"):
            expected = results("blockwise", *(x.astype(jnp.float32) for x in (q, k, v, d_out)))
        try:
            found = results(implementation, q, k, v, d_out)
        except Exception as error:  # whatever a compiler raises, this kernel is not to be used
            return AttentionCheck(implementation, kind, np.inf, np.inf, tolerance, first_line(error))
    values, *gradients = (_relative_error(x, y) for x, y in zip(found, expected, strict=True))
    return AttentionCheck(implementation, kind, values, max(gradients), tolerance)


def _relative_error(found: np.ndarray, expected: np.ndarray) -> float:
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
    checks = hosts.on_each(lambda: _remembered_check(implementation, mesh.local_devices[0], shape, cache))
    failed = next((check for check in checks if not check.passed), None)
    if failed is None:
        return
    if asked != "auto":
        raise ConfigError(f"model.attention={asked}: {failed}; set model.attention=auto or blockwise, the plain form.")
    attention.distrusted.add(implementation)
    if hosts.is_first():
        print(f"Warning: {failed}; the plain form is used, which is much slower.", file=sys.stderr)


def _remembered_check(implementation: str, device: Any, shape: ModelConfig, cache: Path) -> AttentionCheck:
    name = " ".join(
        [
            f"{implementation} {shape.num_heads}:{shape.num_kv_heads}x{shape.head_dim} {shape.dtype}",
            f"{device.device_kind} {' '.join(device.client.platform_version.split())}",
            f"jax {jax.__version__} jaxlib {importlib.metadata.version('jaxlib')}",
        ]
    )
    passed = _read(cache)
    if name in passed:
        values, gradients = passed[name]
        return AttentionCheck(implementation, device.device_kind, values, gradients, TOLERANCE[shape.dtype])
    check = check_attention(implementation, device, shape)
    if check.passed:
        # Every host of a run writes it, and other runs do.
        with exclusive(cache.with_suffix(".lock"), f"the file {cache}", wait=True):
            write_json(cache, _read(cache) | {name: [check.values, check.gradients]})
    return check


def _read(cache: Path) -> dict[str, list[float]]:
    """The two errors of each check by its name; what is missing or damaged is checked anew."""
    try:
        content = json.loads(cache.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    items = content.items() if isinstance(content, dict) else ()
    return {name: errors for name, errors in items if isinstance(errors, list) and len(errors) == 2}
