"""Splits a policy's weights into those that training changes and those that it leaves alone."""

import re

from flax.traverse_util import flatten_dict, unflatten_dict

from poly_epo_jax.types import Params


def is_trainable(path: str, pattern: str) -> bool:
    """Whether a dotted path such as `layers.q` matches the whole pattern; an empty pattern means all."""
    return not pattern or re.fullmatch(pattern, path) is not None


def split_params(params: Params, pattern: str) -> tuple[Params, Params]:
    """(trainable, frozen), as `is_trainable` decides by each weight's path. Leaves may be anything, such as shardings.

    Raises:
      ValueError: no weight matches.
    """
    flat = flatten_dict(params, sep=".")
    trainable = {path: leaf for path, leaf in flat.items() if is_trainable(path, pattern)}
    if not trainable:
        raise ValueError(f"train.trainable={pattern!r} matches no weight; choose among {', '.join(flat)}.")
    frozen = {path: leaf for path, leaf in flat.items() if path not in trainable}
    return unflatten_dict(trainable, sep="."), unflatten_dict(frozen, sep=".")


def merge_params(trainable: Params, frozen: Params) -> Params:
    """All weights together: the inverse of `split_params`."""
    return unflatten_dict(flatten_dict(trainable) | flatten_dict(frozen))
