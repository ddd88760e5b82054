"""A tiny policy with adapters on all projections. Their B matrices are not zero."""

import dataclasses

import jax
import numpy as np
from fakes import TINY, tiny_params

from poly_epo_jax.config.keys import LoraSection
from poly_epo_jax.model.lora import is_adapter, lora_fields
from poly_epo_jax.model.transformer import abstract_model, declared_weights
from poly_epo_jax.types import Params

SECTION = LoraSection(rank=3, alpha=6.0)
ADAPTED = dataclasses.replace(TINY, **lora_fields(SECTION))
ADAPTED_MODEL = abstract_model(ADAPTED)
SCALE = 2.0


def adapted_params(seed: int = 0) -> Params:
    """Returns the weights of `tiny_params`, and adapters whose products have a similar size."""
    params, rng = tiny_params(seed), np.random.default_rng(seed)
    shapes = {path: param.shape for path, param in declared_weights(ADAPTED).items() if is_adapter(path)}
    adapter = {path: (0.35 * rng.standard_normal(shape)).astype(np.float32) for path, shape in shapes.items()}
    return params | {"layers": params["layers"] | {path.split(".")[1]: leaf for path, leaf in adapter.items()}}


def merged_by_hand(params: Params) -> Params:
    """Returns the same policy without adapters: W + (alpha / rank) A B, computed explicitly for each weight."""
    layers = {name: weight for name, weight in params["layers"].items() if not is_adapter(name)}
    for name, product in (("q", "ldr,lrnh->ldnh"), ("k", "ldr,lrnh->ldnh"), ("v", "ldr,lrnh->ldnh")):
        layers[name] = layers[name] + SCALE * _einsum(product, params, name)
    layers["o"] = layers["o"] + SCALE * _einsum("lnhr,lrd->lnhd", params, "o")
    for name in ("gate", "up", "down"):
        layers[name] = layers[name] + SCALE * _einsum("lir,lro->lio", params, name)
    return params | {"layers": layers}


def _einsum(product: str, params: Params, name: str) -> np.ndarray:
    a, b = (np.asarray(params["layers"][f"{name}_lora_{part}"], np.float64) for part in "ab")
    return np.einsum(product, a, b).astype(np.float32)


def as_numpy(params: Params) -> Params:
    return jax.tree.map(np.asarray, params)
