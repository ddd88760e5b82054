"""Tolerance of numerical checks, derived from the rounding error of the compute type on the device.

The reference implementation is computed twice: in the compute type, and in float32 with exact matmuls. The difference
is the rounding error of the compute type on this device. Another correct implementation rounds at other points, so its
error may be a few times larger. The error of an incorrect implementation is larger still.
"""

import contextlib

import jax

SAFETY_FACTOR = 4.0
"""Safety factor. The difference of two independent errors of the same size is 1.4 times as large, and the maximum of
many errors may be three times the typical error."""
FLOAT32_TOLERANCE = 2.0**-17
"""Relative error of 64 units in the last place of float32 (2^-23 each). It sets the tolerance if the measured rounding
error is close to 0, as for float32 on CPUs."""


def tolerance_of(rounding: float, largest: float = 1.0) -> float:
    """Returns the maximum allowed difference between two implementations.

    Args:
      rounding: Measured rounding error of the reference implementation in the compute type.
      largest: Largest magnitude of the compared numbers, to which the float32 rounding error is relative.

    Returns:
      The tolerance, in the unit of `rounding`.
    """
    return SAFETY_FACTOR * rounding + FLOAT32_TOLERANCE * largest


def exact_matmuls() -> contextlib.AbstractContextManager[None]:
    """Returns a context for float32 matmuls in full precision. GPUs and TPUs use a shorter type by default."""
    return jax.default_matmul_precision("highest")
