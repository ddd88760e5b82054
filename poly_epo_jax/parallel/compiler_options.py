"""XLA's options by kind of device, and which of them the compiler of a mesh's devices accepts."""

import functools
import warnings
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from poly_epo_jax.parallel.devices import device_name
from poly_epo_jax.system.text import first_line

_TPU_OPTIONS: dict[str, bool | str] = {
    # By default a large gather becomes a ring of partial products, which on eight chips are too thin to fill a matrix
    # unit: by XLA's own estimate a forward layer of Qwen3-4B takes 20.0 ms with it on a v6e-8, and 8.6 ms without.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
# Updates wait for gathers of weights: 2% of an update, by arithmetic. xla_tpu_enable_async_collective_fusion would
# overlap them with products. But newer compilers refuse it on all TPUs except the v5e, because results may be wrong,
# and together with splash it was seen to make NaN on a v6e (jax-ml/jax#38741).

COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {"v5p": _TPU_OPTIONS, "v6e": _TPU_OPTIONS}
"""XLA's options by device, where its defaults lose time on the programs of an update."""


def compiler_options(mesh: Mesh) -> dict[str, bool | str]:
    """For jax.jit: the options of the mesh's kind of device; a warning names those that this compiler refuses."""
    device = mesh.devices.flat[0]
    return dict(_accepted(device_name(device.device_kind), device))


@functools.cache
def _accepted(name: str, device: Any) -> tuple[tuple[str, bool | str], ...]:
    options = COMPILER_OPTIONS.get(name, {})
    if not options or _refusal(device, options) is None:
        return tuple(options.items())
    refused = {key: _refusal(device, {key: value}) for key, value in options.items()}
    for key, reason in refused.items():
        if reason is not None:
            warnings.warn(
                f"XLA compiles for {name} without {key}={options[key]}, which compiler_options.py sets for speed: "
                f"{reason}; install the versions of launch/lock.txt.",
                stacklevel=2,
            )
    return tuple((key, value) for key, value in options.items() if refused[key] is None)


def _refusal(device: Any, options: dict[str, bool | str]) -> str | None:
    """Why an empty program cannot be compiled with the options; None: it can."""
    nothing = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(nothing).compile()
    except jax.errors.JaxRuntimeError as error:
        return first_line(error)
    return None
