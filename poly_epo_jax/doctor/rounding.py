"""How far two ways to compute the same numbers may lie apart, from what rounding to the compute type does to one.

A tolerance is not guessed: the plain form is computed twice, in the compute type and in float32 with exact matmuls.
What lies between these is that type's rounding on this device. Another form rounds at other places, so it may lie a few
times as far from the exact one; a form that is wrong lies further.
"""

import contextlib

import jax

TIMES = 4.0
"""Two independent errors of one size are 1.4 of it apart; the largest of many may be three times the typical one."""
FLOAT32 = 2.0**-17
"""Sixty-four roundings of float32, relative to the largest number: where the compute type is float32 itself."""


def allowed(rounding: float, largest: float = 1.0) -> float:
    """The most that two forms may differ by, where the plain one's own rounding is `rounding`.

    Args:
      largest: of the numbers that are compared, which float32's own rounding is relative to.
    """
    return TIMES * rounding + FLOAT32 * largest


def exactly() -> contextlib.AbstractContextManager[None]:
    """Within this, matmuls of float32 are not done in a shorter type, as GPUs and TPUs otherwise do."""
    return jax.default_matmul_precision("highest")
