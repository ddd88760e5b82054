"""The options of parallel.presets that XLA accepts when it compiles for a mesh's devices."""

import functools
import warnings
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from poly_epo_jax.first_line import first_line
from poly_epo_jax.parallel.devices import device_name
from poly_epo_jax.parallel.presets import COMPILER_OPTIONS


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
                f"XLA compiles for {name} without {key}={options[key]}, which parallel/presets.py sets for speed: "
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
