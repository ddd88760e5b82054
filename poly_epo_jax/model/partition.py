"""Splits a policy's weights into those that training changes and those that it leaves alone."""

import re
from typing import Any

from poly_epo_jax.types import Params


def is_trainable(path: str, pattern: str) -> bool:
    """Whether a dotted path such as `layers.q` matches the whole pattern; an empty pattern means all."""
    return not pattern or re.fullmatch(pattern, path) is not None


def split_params(params: Params, pattern: str) -> tuple[Params, Params]:
    """(trainable, frozen), as `is_trainable` decides by each weight's path. Leaves may be anything, such as shardings.

    Raises:
      ValueError: no weight matches.
    """
    trainable: Params = {}
    frozen: Params = {}

    def place(tree: Params, path: tuple[str, ...]) -> None:
        for name, child in tree.items():
            if isinstance(child, dict):
                place(child, (*path, name))
                continue
            part = trainable if is_trainable(".".join((*path, name)), pattern) else frozen
            _put(part, (*path, name), child)

    place(params, ())
    if not trainable:
        raise ValueError(f"train.trainable={pattern!r} matches no weight; choose among {', '.join(_paths(params))}.")
    return trainable, frozen


def merge_params(trainable: Params, frozen: Params) -> Params:
    """All weights together: the inverse of `split_params`."""
    merged = dict(trainable)
    for name, child in frozen.items():
        merged[name] = merge_params(merged.get(name, {}), child) if isinstance(child, dict) else child
    return merged


def _put(tree: Params, path: tuple[str, ...], leaf: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf


def _paths(params: Params, prefix: str = "") -> list[str]:
    found = []
    for name, child in params.items():
        found += _paths(child, f"{prefix}{name}.") if isinstance(child, dict) else [prefix + name]
    return found
