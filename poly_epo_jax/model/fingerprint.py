"""32-bit fingerprints of the arrays of a tree, which detect changed content and do not depend on the mesh.

The fingerprint is the sum, modulo 2^32, of a hash of each word (the bits of an array element) and its index. At a given
index, different words have different hashes, so that changing a single word always changes the sum. Other changes are
missed with a probability of 2^-32. An integer sum does not depend on the order of summation, each device communicates
only its partial sum, and the array is read only once.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprints(tree: Any) -> dict[str, int]:
    """Returns the fingerprint of each array, keyed by its name. Every process of a mesh must call this function.

    The arrays are processed one at a time, because on CPUs a compiled program holds the hashes of all its input words
    in memory.
    """
    return {name: int(_fingerprint(leaf)) for name, leaf in zip(array_names(tree), jax.tree.leaves(tree), strict=True)}


def array_names(tree: Any) -> list[str]:
    """Returns the dotted path of each array in the tree, in the order of its leaves."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]


@jax.jit
def _fingerprint(array: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    words = jax.lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    indices = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        stride = math.prod(array.shape[axis + 1 :]) % 2**32
        indices += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride)
    mixed = words ^ (indices * jnp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's finalizer, by Austin Appleby
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
