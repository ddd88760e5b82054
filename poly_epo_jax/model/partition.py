"""Splits the weights of a policy into trainable and frozen weights."""

import re

from flax.traverse_util import flatten_dict, unflatten_dict

from poly_epo_jax.types import Params


def is_trainable(path: str, pattern: str) -> bool:
    """Returns True if a weight is trainable.

    Args:
      path: Dotted path of the weight, such as `layers.q`.
      pattern: Regular expression that must match the complete path. If empty, all weights are trainable.
    """
    return not pattern or re.fullmatch(pattern, path) is not None


def split_params(params: Params, pattern: str) -> tuple[Params, Params]:
    """Splits a parameter tree into trainable and frozen weights.

    Args:
      params: Parameter tree. Leaves may have any type, such as shardings.
      pattern: Regular expression of the trainable paths, see `is_trainable`.

    Returns:
      A tuple of the trainable and the frozen weights. Both are trees with the paths of `params`.

    Raises:
      ValueError: If no weight matches.
    """
    flat = flatten_dict(params, sep=".")
    trainable = {path: leaf for path, leaf in flat.items() if is_trainable(path, pattern)}
    if not trainable:
        raise ValueError(f"train.trainable_pattern={pattern!r} matches no weight; choose among {', '.join(flat)}.")
    frozen = {path: leaf for path, leaf in flat.items() if path not in trainable}
    return unflatten_dict(trainable, sep="."), unflatten_dict(frozen, sep=".")


def merge_params(trainable: Params, frozen: Params) -> Params:
    """Merges trainable and frozen weights into one tree. Inverse of `split_params`."""
    return unflatten_dict(flatten_dict(trainable) | flatten_dict(frozen))
