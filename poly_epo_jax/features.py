"""What advantage estimators read from a batch: arrays [P, N, ...] over its prompts and their generations, by name."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Shaped

from poly_epo_jax.types import Clustering, Generation, GradedGroup


def batch_features(groups: Sequence[GradedGroup], num_generations: int) -> dict[str, Shaped[np.ndarray, "P N ..."]]:
    """The features of P groups, each of N generations.

    rewards       the task's rewards, in [0, 1]
    lengths       how many tokens the policy wrote
    mean_logprob  the mean log-probability of these tokens under the sampler's policy, in nats
    clusters      cluster ids, if every group has them
    and whatever the judge added, under the judge's own names.

    Raises:
      ValueError: the judge added a feature to only some groups, or under a name that is taken.
    """
    shape = len(groups), num_generations
    generations = [group.group.generations for group in groups]
    features = {
        "rewards": np.array([group.rewards for group in groups], np.float32).reshape(shape),
        "lengths": np.array([[y.loss_mask.sum() for y in row] for row in generations], np.int32).reshape(shape),
        "mean_logprob": np.array([[_mean_logprob(y) for y in row] for row in generations], np.float32).reshape(shape),
    }
    clusterings = [group.clustering for group in groups if isinstance(group.clustering, Clustering)]
    if not groups or len(clusterings) < len(groups):
        return features
    features["clusters"] = np.array([clustering.ids for clustering in clusterings], np.int32)
    for name in sorted({name for clustering in clusterings for name in clustering.features}):
        if name in features or not all(name in clustering.features for clustering in clusterings):
            raise ValueError(
                f"The judge adds the feature {name!r} to some groups only, or under a name that is taken; it must add "
                f"it to every group, and not as one of {', '.join(sorted(features))}."
            )
        features[name] = np.stack([clustering.features[name] for clustering in clusterings])
    return features


def _mean_logprob(generation: Generation) -> float:
    return float(generation.logprobs[generation.loss_mask].mean())
