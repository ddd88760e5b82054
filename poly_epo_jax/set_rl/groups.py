"""Converts and checks the inputs of set_rl, centers values over a prompt, and compares clusters.

Functions return the kind of array that they are given: torch tensors, NumPy arrays or JAX arrays. Functions of JAX
arrays run on the devices of the arrays, and can be called under jit. Functions of other inputs run on the CPU.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Float, Int, Shaped

from poly_epo_jax.types import DEGENERATE_CLUSTER

P = ParamSpec("P")


@runtime_checkable
class Tensor(Protocol):
    """A torch tensor, recognized by its attributes, because torch is not imported."""

    requires_grad: bool

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...
    def detach(self) -> Any: ...


Scalars = Shaped[Array | np.ndarray, "P N"] | Sequence[Sequence[float]] | Tensor
"""Numbers or ids of the N generations of P prompts, before `as_features` converts and checks them."""
Embeddings = Shaped[Array | np.ndarray, "P N D"] | Sequence[Sequence[Sequence[float]]] | Tensor
"""Embeddings with D dimensions of the N generations of P prompts, before `as_features` converts and checks them."""


def is_tensor(values: Any) -> bool:
    """Returns True for a torch tensor."""
    return isinstance(values, Tensor)


_INTEGERS = ("clusters", "sets", "sequence_ids")
_NUMBERS = ("rewards", "mean_logprob", "embeddings", "logprobs", "old_logprobs", "advantages", "weights", "log_ratio")
FEATURES = ("rewards", "clusters", "mean_logprob", "embeddings")
"""Names of the features that functions of set_rl read."""
_EXTRA_AXES = {"rewards": 0, "clusters": 0, "mean_logprob": 0, "embeddings": 1}  # after [P, N]


def as_features(num_axes: int | None = 2, **features: Any) -> tuple[Array, ...]:
    """Converts features to arrays and checks them. All estimators and objectives of set_rl call this function.

    Args:
      num_axes: Number of leading axes that all features share: 2 for [P, N], or None for all axes of the first feature.
      **features: Features by name, see `as_array`. Embeddings have one axis after the shared axes. Features with names
        that are not in `_EXTRA_AXES` may have any number of further axes.

    Returns:
      The arrays, in the order of the arguments.

    Raises:
      ValueError: If the shapes differ, or a feature is invalid (see `as_array`).
    """
    arrays = {name: as_array(name, values) for name, values in features.items()}
    shape = next(iter(arrays.values())).shape[:num_axes]
    rank = len(shape)
    if rank < (num_axes or 1) or any(
        array.shape[:rank] != shape or array.ndim - rank != _EXTRA_AXES.get(name, array.ndim - rank)
        for name, array in arrays.items()
    ):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        expected = "[P, N] for P prompts with N generations" if num_axes else "[..., K, n] for K sets of n generations"
        raise ValueError(f"Features must share the shape {expected}, plus one axis for embeddings, but have {shapes}.")
    return tuple(arrays.values())


def as_array(name: str, values: Any, counts: Any = True) -> Array:
    """Converts the values of an argument to a JAX array. Values are checked outside jit only, where they are known.

    Args:
      name: Name of the argument, see `as_numpy`.
      values: A JAX array, or an object that `as_numpy` converts.
      counts: Mask of the values that are checked.

    Returns:
      The array.

    Raises:
      ValueError: If the values are invalid, see `as_numpy`.
    """
    if isinstance(values, Tracer):
        return jnp.asarray(values, _dtype(name, values.dtype))
    checked = as_numpy(name, values, counts)
    return jnp.asarray(values if isinstance(values, Array) else checked, checked.dtype)


def as_numpy(name: str, values: Any, counts: Any = True) -> np.ndarray:
    """Converts the values of an argument to a NumPy array, and checks them.

    Arguments with names in `_INTEGERS` become int32. Integers, booleans and 16-bit floats become float32 if the name is
    in `_NUMBERS`. Other arrays keep their type, but 64-bit types become 32-bit types unless `jax_enable_x64` is set.

    Args:
      name: Name of the argument. It determines the type, and is included in error messages.
      values: An array, a torch tensor, a nested list, or another object that NumPy can convert.
      counts: Mask of the values that are checked.

    Returns:
      The array.

    Raises:
      ValueError: If the values cannot be converted to numbers, require a gradient in torch, are not integers although
        integers are required, exceed the range of the type, or are NaN or infinite.
    """
    try:
        if is_tensor(values):
            # NumPy does not support bfloat16. Tensors that require a gradient raise RuntimeError.
            is_short = values.is_floating_point() and values.element_size() < 4
            given = (values.float() if is_short else values).cpu().numpy()
        else:
            given = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(values).__module__}.{type(values).__name__}"
        raise ValueError(
            f"{name} of type {kind} cannot be converted to an array ({error}); pass an array, a torch tensor or a "
            f"nested list of numbers. Gradients of torch tensors are not computed: pass {name}.detach()."
        ) from None
    dtype = _dtype(name, given.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = given.astype(dtype)
    is_valid = np.isfinite(converted) if jnp.issubdtype(dtype, jnp.floating) else converted == given
    is_invalid = ~is_valid & counts
    if is_invalid.any():
        index = np.argwhere(is_invalid)[0].tolist()
        value = given[tuple(index)]
        raise ValueError(
            f"{name} contains {'NaN' if np.isnan(value) else value} at index {index}, but must contain finite {dtype} "
            "values; replace this value."
        )
    return converted


def described(returned: Any) -> str:
    """Describes a returned value in an error message, such as "an array of shape (8,)" or "a NoneType"."""
    return f"an array of shape {returned.shape}" if hasattr(returned, "shape") else f"a {type(returned).__name__}"


def _dtype(name: str, given: np.dtype) -> np.dtype:
    """Returns the type to which `as_numpy` converts values of the type `given`."""
    is_integer = given.kind == "b" or jnp.issubdtype(given, jnp.integer)
    if not (is_integer or (name not in _INTEGERS and jnp.issubdtype(given, jnp.floating))):
        required = "integers" if name in _INTEGERS else "numbers"
        raise ValueError(f"{name} has the type {given}; pass an array of {required}.")
    if name in _INTEGERS:
        return np.dtype(np.int32)
    canonical = jax.dtypes.canonicalize_dtype(given)  # without 64 bits, unless they are enabled
    return jnp.result_type(float if is_integer else canonical, jnp.float32) if name in _NUMBERS else canonical


def subtract_mean(values: Shaped[Array, "*prompts N"]) -> Float[Array, "*prompts N"]:
    """Subtracts the mean over the last axis, such as the generations of each prompt.

    The result is exactly 0 if all values are equal, because the first value is subtracted before the mean is computed.
    XLA may fuse a preceding product with this subtraction without rounding the product. The resulting error for equal
    values is therefore also subtracted.
    """
    first = values[..., :1]
    differences = values - first
    differences -= jax.lax.stop_gradient(jnp.where(values == first, differences, 0))
    return differences - differences.mean(axis=-1, keepdims=True)


def same_cluster(clusters: Int[Array, "P N"]) -> Bool[Array, "P N N"]:
    """Returns a mask that is True where two generations of a prompt share a cluster."""
    return clusters[:, :, None] == clusters[:, None, :]


def cluster_sizes(clusters: Int[Array, "P N"]) -> Int[Array, "P N"]:
    """Returns the size of each generation's cluster, including the generation."""
    return same_cluster(clusters).sum(axis=-1)


def rarity(clusters: Int[Array, "P N"]) -> Float[Array, "P N"]:
    """Returns the diversity d_i = (N / |cluster of i| - 1) / (N - 1) of each generation (paper §6.1, GRPO+DIV).

    d_i is 0 if all generations share a cluster, and 1 for a cluster of one generation. Unlike in the paper, it is 0 in
    `DEGENERATE_CLUSTER`, so that rare degenerate responses earn no bonus.
    """
    num_generations = clusters.shape[-1]
    rare = (num_generations / cluster_sizes(clusters) - 1) / max(num_generations - 1, 1)
    return jnp.where(clusters == DEGENERATE_CLUSTER, 0.0, rare)


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
