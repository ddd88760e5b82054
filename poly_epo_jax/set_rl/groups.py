"""What estimators share: checking features, centring a prompt's values, and comparing its clusters."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Float, Int, Shaped

from poly_epo_jax.types import DEGENERATE_CLUSTER


def check_features(**features: Array | np.ndarray) -> tuple[int, int]:
    """Returns the (P, N) that all features share.

    Raises:
      ValueError: they share none, or hold NaN (detected outside jit only).
    """
    shapes = {name: feature.shape[:2] for name, feature in features.items()}
    if len(set(shapes.values())) != 1 or min(map(len, shapes.values())) < 2:
        raise ValueError(f"Features must share their leading [P, N] shape, but have {shapes}.")
    for name, feature in features.items():
        if not isinstance(feature, Tracer) and np.isnan(feature).any():
            raise ValueError(f"{name} hold NaN: give every generation a number, 0 for one that could not be scored.")
    num_prompts, num_generations = set(shapes.values()).pop()
    return num_prompts, num_generations


def centred(values: Shaped[Array, "P N"]) -> Float[Array, "P N"]:
    """The values minus their mean: exactly 0 where all are equal, because differences to one of them are exact."""
    differences = values - values[..., :1]
    return differences - differences.mean(axis=-1, keepdims=True)


def same_cluster(clusters: Int[Array, "P N"]) -> Bool[Array, "P N N"]:
    """Whether two generations of a prompt are in one cluster."""
    return clusters[:, :, None] == clusters[:, None, :]


def cluster_sizes(clusters: Int[Array, "P N"]) -> Int[Array, "P N"]:
    """How many generations are in a generation's cluster, itself included."""
    return same_cluster(clusters).sum(axis=-1)


def rarity(clusters: Int[Array, "P N"]) -> Float[Array, "P N"]:
    """d_i = (N / |cluster of i| - 1) / (N - 1): 0 where all agree, 1 for a cluster of one (paper §6.1, GRPO+DIV).

    A generation in `DEGENERATE_CLUSTER` gets 0, our choice: gibberish must not be rewarded for being rare.
    """
    num_generations = clusters.shape[-1]
    rare = (num_generations / cluster_sizes(clusters) - 1) / max(num_generations - 1, 1)
    return jnp.where(clusters == DEGENERATE_CLUSTER, 0.0, rare)
