"""Tests of the helper functions of estimators against values computed by hand."""

import jax.numpy as jnp
import numpy as np

from poly_epo_jax.set_rl.groups import cluster_sizes, rarity, same_cluster, subtract_mean
from poly_epo_jax.types import DEGENERATE_CLUSTER

CLUSTERS = jnp.array([[1, 1, 2, DEGENERATE_CLUSTER, 1]])


def test_clusters_by_hand():
    np.testing.assert_array_equal(cluster_sizes(CLUSTERS), [[3, 3, 1, 1, 3]])
    np.testing.assert_array_equal(same_cluster(CLUSTERS)[0, 0], [True, True, False, False, True])
    third = (5 / 3 - 1) / 4
    np.testing.assert_allclose(rarity(CLUSTERS), [[third, third, 1, 0, third]], rtol=1e-6)


def test_rarity_of_a_single_generation_is_zero():
    np.testing.assert_array_equal(rarity(jnp.array([[7], [DEGENERATE_CLUSTER]])), [[0], [0]])


def test_centering_equal_values_gives_exactly_zero():
    np.testing.assert_array_equal(subtract_mean(jnp.full((1, 7), 0.1)), np.zeros((1, 7)))
    np.testing.assert_allclose(subtract_mean(jnp.array([[1.0, 2.0, 6.0]])), [[-2, -1, 3]])
