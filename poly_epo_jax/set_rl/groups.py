"""Helper functions of the estimators: feature checks, centering over a prompt, and cluster comparisons."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Float, Int, Shaped

from poly_epo_jax.types import DEGENERATE_CLUSTER


def check_features(**features: Array | np.ndarray) -> tuple[int, int]:
    """Returns the leading shape (P, N) of all features.

    Raises:
      ValueError: If the leading shapes differ, or a feature contains NaN (detected outside jit only).
    """
    shapes = {name: feature.shape[:2] for name, feature in features.items()}
    if len(set(shapes.values())) != 1 or min(map(len, shapes.values())) < 2:
        raise ValueError(f"Features must share their leading [P, N] shape, but have the shapes {shapes}.")
    for name, feature in features.items():
        if not isinstance(feature, Tracer) and np.isnan(feature).any():
            raise ValueError(
                f"The feature {name} contains NaN; set each value to a number, such as 0 for a missing score."
            )
    num_prompts, num_generations = set(shapes.values()).pop()
    return num_prompts, num_generations


def subtract_mean(values: Shaped[Array, "P N"]) -> Float[Array, "P N"]:
    """Subtracts the mean over the generations of each prompt.

    The result is exactly 0 if all values are equal, because the first value is subtracted before the mean is computed.
    """
    differences = values - values[..., :1]
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
