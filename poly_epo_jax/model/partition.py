"""A policy's weights in two parts, those that training changes and those that it leaves alone."""

import re
from typing import Any

from poly_epo_jax.types import Params


def split_params(params: Params, pattern: str) -> tuple[Params, Params]:
    """(trainable, frozen): trainable is each weight whose dotted path, `layers.q`, matches the whole pattern.

    The leaves may be anything, shardings and shapes too. An empty pattern means all.

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
            matches = not pattern or re.fullmatch(pattern, ".".join((*path, name)))
            _put(trainable if matches else frozen, (*path, name), child)

    place(params, ())
    if not trainable:
        raise ValueError(f"train.trainable={pattern!r} matches no weight; choose among {', '.join(_paths(params))}.")
    return trainable, frozen


def merge_params(trainable: Params, frozen: Params) -> Params:
    """The whole: the inverse of `split_params`."""
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
