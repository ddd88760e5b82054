import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packings import (
    kernel_calls,
    output_and_gradients,
    random_inputs,
    random_packing,
    relative_errors,
    visible,
    whole_matrix,
)

from poly_epo_jax.model.attention import packed_attention, splash
from poly_epo_jax.model.attention.segments import Segments, make_segments

BLOCK = 8


def mask_infos(segments: Segments, groups: int) -> Any:
    return jax.device_get(_mask_infos(segments, BLOCK, groups))


_mask_infos = jax.jit(splash.mask_infos, static_argnums=(1, 2))
compiled_segments = jax.jit(make_segments, static_argnums=1)


def visited(segments: Segments, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts how often query and key kernels process each block, as two arrays [groups, blocks, blocks]."""
    keys, queries = mask_infos(segments, groups)
    blocks = np.asarray(keys.data_next).shape[2]
    of_queries, of_keys = np.zeros((2, groups, blocks, blocks), int)
    for g, _, i, step in zip(*np.nonzero(keys.block_mask), strict=True):
        of_queries[g, i, keys.data_next[g, 0, i, step]] += 1
    for g, _, step, j in zip(*np.nonzero(queries.block_mask), strict=True):
        of_keys[g, queries.data_next[g, 0, step, j], j] += 1
    return of_queries, of_keys


def needed(segment_ids: np.ndarray, groups: int) -> np.ndarray:
    """Returns the mask [groups, blocks, blocks] of blocks with a visible pair. Rows of a group are concatenated."""
    rows, length = segment_ids.shape
    blocks, per_group = length // BLOCK, rows // groups
    own: Any = visible(segment_ids).reshape(rows, blocks, BLOCK, blocks, BLOCK).any((2, 4))
    joined = np.zeros((groups, per_group * blocks, per_group * blocks), int)
    for row in range(rows):
        at = slice(row % per_group * blocks, (row % per_group + 1) * blocks)
        joined[row // per_group, at, at] = own[row]
    return joined


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("longest", [0, 20])
def test_exactly_the_blocks_with_a_visible_pair_are_visited_once(longest: int, groups: int):
    for seed in range(10):
        ids = random_packing(np.random.default_rng(seed), 4, 64, longest=longest or None)
        of_queries, of_keys = visited(compiled_segments(ids, longest), groups)
        np.testing.assert_array_equal(of_queries, needed(ids, groups))
        np.testing.assert_array_equal(of_keys, needed(ids, groups))


def test_only_visited_blocks_are_fetched():
    """The kernels fetch a block if it differs from the block of the previous step."""
    for seed in range(5):
        ids = random_packing(np.random.default_rng(seed), 1, 64)
        keys, queries = mask_infos(compiled_segments(ids), 1)
        orders = np.asarray(keys.data_next), np.asarray(queries.data_next).swapaxes(2, 3)
        for info, order in zip((keys, queries), orders, strict=True):
            fetches = 1 + np.count_nonzero(np.diff(order.reshape(-1)))
            assert fetches <= np.sum(info.block_mask)


def one_later(segments: Segments) -> Segments:
    """Moves the start of each segment one block to the right."""
    return dataclasses.replace(segments, first=jnp.minimum(segments.first + BLOCK, jnp.arange(64)[None]))


def the_whole_row(segments: Segments) -> Segments:
    return dataclasses.replace(segments, first=jnp.zeros_like(segments.first))


def too_short(segments: Segments) -> Segments:
    return dataclasses.replace(segments, max_segment_tokens=2 * BLOCK)


@pytest.mark.parametrize("mutant", [one_later, the_whole_row, too_short])
def test_incorrect_bounds_are_detected(mutant):
    ids = np.repeat([[1, 2]], [30, 34], axis=1).astype(np.int32)
    assert (visited(compiled_segments(ids), 1)[0] == needed(ids, 1)).all()
    of_queries, of_keys = visited(mutant(compiled_segments(ids)), 1)
    assert (of_queries != needed(ids, 1)).any()
    assert (of_keys != needed(ids, 1)).any()


@pytest.mark.parametrize(
    ("rows", "num_steps", "blocks", "groups"),
    [
        (4, 11, 32, 1),
        (31, 11, 32, 1),
        (32, 11, 32, 2),
        (2, 256, 256, 2),
        (4, 256, 256, 4),
        (64, 1, 1, 1),
        (2048, 1, 1, 4),
    ],
)
def test_scalar_memory_limits_the_rows_of_a_group(rows: int, num_steps: int, blocks: int, groups: int):
    assert splash._groups(rows, num_steps, blocks) == groups


def test_a_changed_interface_is_rejected():
    with pytest.raises(ImportError, match=r"splash attention .* model\.attention=blockwise"):
        splash._known_options(block_sizes=None, mask_like_nothing_known=0)


SPLASH = functools.partial(packed_attention, implementation="splash")
BOUNDED = functools.partial(packed_attention, implementation="splash", max_segment_tokens=200)


def compare(seed: int, heads: int, kv_heads: int, head_dim: int, dtype: str, limit: float) -> None:
    """Compares one row of three blocks (even seeds), or two incomplete rows with a segment limit (odd seeds)."""
    rng, is_odd = np.random.default_rng(seed), seed % 2
    ids = random_packing(rng, 1 + is_odd, 384 - is_odd, longest=200 if is_odd else None)
    inputs = [jnp.asarray(x, dtype) for x in random_inputs(rng, len(ids), ids.shape[1], heads, kv_heads, head_dim)]
    expected = output_and_gradients(whole_matrix, [x.astype(jnp.float32) for x in inputs], ids)
    found = output_and_gradients(BOUNDED if is_odd else SPLASH, inputs, ids)
    assert max(relative_errors(found, expected)) < limit


CASES = [
    (4, 2, 64, "float32", 1e-5),
    (2, 2, 128, "float32", 1e-5),
    (4, 1, 128, "bfloat16", 2e-2),
    (6, 2, 64, "bfloat16", 2e-2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "seed"), [(case, index % 2) for index, case in enumerate(CASES)])
def test_splash_matches_the_reference(case, seed: int, monkeypatch):
    # Rows have three blocks: some are skipped, and segments cross the others.
    monkeypatch.setattr(splash, "BLOCK", 128)
    compare(seed, *case)


# test_triton.py tests the other policies.
@pytest.mark.parametrize(("remat", "kernels"), [("full", 4), ("attention", 3)])
def test_remat_runs_each_kernel_of_a_layer_only_as_needed(remat: str, kernels: int):
    """Forward, a second forward unless its results are kept, the query gradient, and the key and value gradient."""
    assert kernel_calls(remat, "tpu") == kernels
