"""Makes functions return the kind of array that they are given: torch tensors, NumPy arrays or JAX arrays.

Functions of JAX arrays run on the devices of the arrays, and can be called under jit. Functions of other inputs run on
the CPU.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import jax
import numpy as np
from jax import Array
from jax.core import Tracer

from poly_epo_jax.set_rl.groups import FEATURES, as_numpy, is_tensor

P = ParamSpec("P")


def returns_kind_of_input(function: Callable[P, Any]) -> Callable[P, Any]:
    """Decorates a function of features, so that its results have the kind and device of its first argument.

    Without JAX arrays, the function is compiled for each shape and for each value of its options.

    Args:
      function: A function that returns a JAX array or a tuple of them. Its parameters are features, see `FEATURES`, and
        hashable options.

    Returns:
      The function, which also accepts torch tensors.
    """
    signature = inspect.signature(function)
    options = [name for name in signature.parameters if name not in FEATURES]
    compiled = jax.jit(function, static_argnames=options)

    @functools.wraps(function)
    def converted(*args: P.args, **kwargs: P.kwargs) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        first = next(iter(given.values()))
        if isinstance(first, Array) or any(isinstance(value, Tracer) for value in given.values()):
            return function(*args, **kwargs)
        arguments = {name: value if name in options else as_numpy(name, value) for name, value in given.items()}
        return in_kind_of(first, lambda: compiled(**arguments))

    return converted


def in_kind_of(first: Any, compute: Callable[[], Any]) -> Any:
    """Converts computed JAX arrays to the kind and device of `first`, and computes on the CPU unless it is a JAX array.

    JAX allocates memory of all GPUs when it starts. It is therefore started without them for the first torch tensor,
    unless `JAX_PLATFORMS` is set. This has no effect if JAX has started before.

    Args:
      first: An array, a torch tensor or a list. Results for a list are NumPy arrays.
      compute: Function that returns a JAX array or a tuple of them.

    Returns:
      The results, in float32 or, if `jax_enable_x64` is set, in float64.
    """
    if isinstance(first, Array):
        return compute()
    if is_tensor(first) and not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")
    with jax.default_device(_cpu()):
        return jax.tree.map(functools.partial(_convert, first), compute())


@functools.cache
def _cpu() -> Any:
    """Returns the CPU, or None if `JAX_PLATFORMS` excludes it: results are then computed on the default device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _convert(first: Any, values: Array) -> Any:
    if isinstance(values, Tracer):  # the function was called under jit with constants
        return values
    if is_tensor(first):
        like = first.double() if values.dtype == np.float64 else first.float()
        return like.new_tensor(np.asarray(values))
    return np.array(values)
