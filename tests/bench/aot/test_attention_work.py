"""Tests of the pairs of tokens that attention kernels compute, against explicit masks."""

import numpy as np

from poly_epo_jax.bench.aot.attention_work import kernel_flops, own_pairs, visited_pairs
from poly_epo_jax.model.presets import preset_config


def random_rows(rng, rows=3, length=96):
    ids = np.zeros((rows, length), np.int32)
    for row in ids:
        start, segment = 0, 1
        while start < length - 10:  # The last 10 tokens are padding.
            size = int(rng.integers(1, 40))
            row[start : min(start + size, length - 10)] = segment
            start, segment = start + size, segment + 1
    return ids


def visible(row, window):
    place = np.arange(len(row))
    same = (row[:, None] == row[None]) & (row > 0)[:, None]
    near = place[:, None] - place[None] < (window or len(row))
    return (same & near & (place[None] <= place[:, None])) | np.eye(len(row), dtype=bool)


def test_pair_counts_equal_masks_and_their_blocks():
    rng = np.random.default_rng(0)
    for window in range(20):
        ids = random_rows(rng)
        masks = [visible(row, window) for row in ids]
        assert own_pairs(ids, (window, window)) == sum(mask.sum() for mask in masks)
        for q, k in ((8, 8), (16, 8), (8, 16), (96, 96)):
            blocks = [mask.reshape(96 // q, q, 96 // k, k).any(axis=(1, 3)) for mask in masks]
            assert visited_pairs(ids, q, k, window) == q * k * sum(block.sum() for block in blocks)


def test_flops_of_one_sequence():
    config, ids = preset_config("Qwen3-4B"), np.ones((1, 4096), np.int32)
    pairs = 512 * 512 * 8 * 9 / 2
    assert kernel_flops(config, ids, 32, "splash_mha_fwd_segmented") == 2 * 2 * 128 * 32 * pairs
    assert kernel_flops(config, ids, 32, "splash_mha_dkv_segmented") == 2 * 4 * 128 * 32 * pairs
    assert kernel_flops(config, ids, 32, "unknown") == 0
