"""How far two ways to compute the same numbers may differ, from what rounding to the compute type does to one of them.

The tolerance is not guessed: the plain form is computed twice, in the compute type and in float32 with exact matmuls.
The difference between the two is that type's rounding on this device. Another form rounds in other places, so it may
differ from the exact result by a few times as much; a wrong form differs by more.
"""

import contextlib

import jax

TIMES = 4.0
"""Two independent errors of one size differ by 1.4 times that; the largest of many may be three times the typical."""
FLOAT32 = 2.0**-17
"""Sixty-four float32 roundings, relative to the largest number: for when the compute type is float32 itself."""


def allowed(rounding: float, largest: float = 1.0) -> float:
    """The most that two forms may differ by if the plain form's own rounding is `rounding`.

    Args:
      largest: the largest of the compared numbers, which float32's own rounding is relative to.
    """
    return TIMES * rounding + FLOAT32 * largest


def exactly() -> contextlib.AbstractContextManager[None]:
    """Inside this context, float32 matmuls are not done in a shorter type, as GPUs and TPUs otherwise do them."""
    return jax.default_matmul_precision("highest")
