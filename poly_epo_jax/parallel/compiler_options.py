"""XLA compiler options: for each device kind, limited to the options that the installed compiler accepts, and for
deterministic programs on GPUs.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from poly_epo_jax.parallel.devices import device_name
from poly_epo_jax.system.text import first_line

_TPU_OPTIONS: dict[str, bool | str] = {
    # By default, XLA replaces a large gather by a ring of partial matmuls. On eight chips, these matmuls are too small
    # to fill a matrix unit: XLA estimates 20.0 ms for the forward pass of a Qwen3-4B layer on a v6e-8 with the ring,
    # and 8.6 ms without it.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
# Updates wait for gathers of weights, for an estimated 2% of their time. xla_tpu_enable_async_collective_fusion would
# overlap the gathers with matmuls. However, newer compilers reject it on all TPUs except v5e because results may be
# incorrect, and in combination with splash attention it produced NaN on a v6e (jax-ml/jax#38741).

_V6E_OPTIONS = _TPU_OPTIONS | {
    # Memory for the tiles of a fusion, of the 128 MiB on the chip. XLA estimates 10% less time for the gradient of
    # Qwen3-4B on a v6e-8, but compiles two to three times as long.
    "xla_tpu_scoped_vmem_limit_kib": "98304",
}

COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {"v5p": _TPU_OPTIONS, "v6e": _V6E_OPTIONS}
"""XLA options by device, for devices on which the defaults slow down the compiled programs of an update."""


DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
"""Options of deterministic programs on GPUs.

By default, values that are added to the same row, as in the gradient of the embedding, are added in any order, and XLA
chooses the fastest of several algorithms by measuring them in each process. With this option, XLA sorts the values
first, and chooses the first algorithm that works.
"""

_uses_deterministic = False


def use_deterministic_programs(enabled: bool) -> None:
    """Sets whether programs that this process compiles after this call are deterministic.

    This applies to programs with the options of this file, and only to GPUs. Programs for CPUs and TPUs always are.
    """
    global _uses_deterministic
    _uses_deterministic = enabled


def deterministic_options() -> dict[str, bool]:
    """Returns the options of deterministic programs if they were selected and the default devices are GPUs."""
    return DETERMINISTIC if _uses_deterministic and jax.default_backend() == "gpu" else {}


class Jit:
    """A function that `jax.jit` compiles, with the `deterministic_options` at the time of each call.

    Args:
      function: The function.
      **settings: Arguments of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], **settings: Any):
        self._default = jax.jit(function, **settings)
        self._deterministic = jax.jit(function, compiler_options=DETERMINISTIC, **settings)

    @property
    def jitted(self) -> Any:
        """The jitted function that a call would use."""
        return self._deterministic if deterministic_options() else self._default

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls `jitted`."""
        return self.jitted(*arguments, **named)


def compiler_options(mesh: Mesh) -> dict[str, bool | str]:
    """Returns the options for `jax.jit` on the devices of a mesh. Warns about options that the compiler rejects."""
    # A process may be unable to compile for the devices of other processes.
    device = min(mesh.devices.flat, key=lambda device: device.process_index != jax.process_index())
    return dict(_accepted(device_name(device.device_kind), device)) | deterministic_options()


@functools.cache
def _accepted(name: str, device: Any) -> tuple[tuple[str, bool | str], ...]:
    accepted = []
    for key, value in COMPILER_OPTIONS.get(name, {}).items():
        if (reason := _rejection(device, {key: value})) is None:
            accepted.append((key, value))
        else:
            warnings.warn(
                f"The XLA option {key}={value}, which makes {name} faster, is not accepted by this compiler and is "
                f"omitted: {reason}. Install the versions in launch/lock.txt.",
                stacklevel=2,
            )
    return tuple(accepted)


def _rejection(device: Any, options: dict[str, bool | str]) -> str | None:
    """Compiles an empty program with the options. Returns the error message, or None if it succeeds."""
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        return first_line(error)
    return None
