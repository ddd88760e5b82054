from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packings import random_packing, visible

from poly_epo_jax.model.attention.segments import make_segments


def test_first_keys_of_a_known_row():
    ids = jnp.asarray([[1, 1, 2, 2, 2, 0, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4, 4]])
    expected = [[0, 0, 2, 2, 2, 5, 6, 7, 8], [0] * 9]
    np.testing.assert_array_equal(make_segments(ids).first, expected)
    padded = make_segments(ids).padded(4).first
    np.testing.assert_array_equal(padded[:, :9], expected)
    np.testing.assert_array_equal(padded[:, 9:], [[9, 10, 11]] * 2)


def test_a_repeated_id_starts_another_segment():
    np.testing.assert_array_equal(make_segments(jnp.asarray([[1, 2, 2, 1, 1]])).first, [[0, 1, 1, 3, 3]])


@pytest.mark.parametrize(("query_block", "key_block"), [(8, 8), (16, 4), (4, 16)])
def test_block_ranges_cover_exactly_the_visible_pairs(query_block: int, key_block: int):
    @jax.jit
    def ranges(ids):
        segments, blocks = make_segments(ids), (query_block, key_block)
        return segments.first_key_blocks(*blocks), segments.last_query_blocks(*blocks)

    for seed in range(10):
        ids = random_packing(np.random.default_rng(seed), rows=3, length=64)
        needed: Any = visible(ids).reshape(3, 64 // query_block, query_block, 64 // key_block, key_block).any((2, 4))
        first, last = ranges(ids)
        np.testing.assert_array_equal(first, needed.argmax(axis=2))
        np.testing.assert_array_equal(last, 64 // query_block - 1 - needed[:, ::-1].argmax(axis=1))
