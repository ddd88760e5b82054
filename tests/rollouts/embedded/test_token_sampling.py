"""Compares token sampling with a softmax that is filtered by sorting, statistically and token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.rollouts.embedded import token_sampling
from poly_epo_jax.rollouts.embedded.token_sampling import BLOCK, sample_tokens

DRAWS = 20_000
FILTERS = [(0.1, 0), (0.5, 0), (0.9, 0), (0.99, 0), (0.999, 0), (1.0, 1), (1.0, 10), (1.0, 1000), (0.5, 1), (0.9, 10)]


def reference_kept(probabilities, top_p, top_k):
    """Returns a mask of the kept tokens, computed by sorting. Ties with the last kept token are kept."""
    ordered = np.sort(probabilities)[::-1]
    kept = probabilities >= ordered[min(top_k or len(ordered), len(ordered)) - 1]
    ordered = ordered[ordered >= probabilities[kept].min()]
    reaches = ordered.cumsum() / ordered.sum() >= top_p
    return kept & (probabilities >= (ordered[reaches.argmax()] if top_p < 1 else 0))


def softmax(logits):
    p = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return p / p.sum()


def independent(rows):
    return jnp.tile(jnp.asarray(token_sampling.INDEPENDENT), (rows, 1))


def draw(logits, draws=DRAWS, index=3, temperature=1.0, top_p=1.0, top_k=0):
    """Samples one token for each of `draws` seeds, and returns the tokens and their log-probabilities."""
    columns = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[:, None], (len(logits), draws))
    indices = jnp.full(draws, index, jnp.int32)
    seeds = jnp.arange(draws, dtype=jnp.uint32) * jnp.uint32(2654435761)
    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    return jax.tree.map(np.asarray, sample_tokens(columns, seeds, indices, independent(draws), **settings)[:2])


def random_logits(size, spread=1.0, ties=False, seed=0):
    logits = np.random.default_rng(seed).normal(scale=spread, size=size).astype(np.float32)
    return np.round(logits * 4) / 4 if ties else logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "spread", "ties", "temperature", "top_p", "top_k"),
    [
        (32, 1.0, False, 1.0, 1.0, 0),
        (300, 1.0, False, 1.4, 1.0, 0),  # Several blocks, the last one incomplete.
        (40, 0.5, False, 1.0, 0.3, 0),  # Many rejections.
        (300, 0.5, True, 1.0, 0.5, 0),
        (40, 1.0, True, 1.0, 1.0, 7),
        (300, 1.0, False, 1.3, 0.6, 60),
    ],
)
def test_tokens_have_the_filtered_distribution(size, spread, ties, temperature, top_p, top_k):
    logits = random_logits(size, spread, ties)
    unfiltered = softmax(logits.astype(np.float64) / temperature)
    kept = reference_kept(unfiltered, top_p, top_k)
    expected = np.where(kept, unfiltered, 0) / unfiltered[kept].sum() * DRAWS
    tokens, logprobs = draw(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    counts = np.bincount(tokens, minlength=size)
    assert not counts[~kept].any() and expected[kept].min() > 5
    chi_square, freedom = ((counts - expected)[kept] ** 2 / expected[kept]).sum(), kept.sum() - 1
    assert abs(chi_square - freedom) < 4.5 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(logprobs, np.log(unfiltered[tokens]), rtol=0, atol=2e-6)  # Not renormalized.


@pytest.mark.parametrize(("top_p", "top_k"), FILTERS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("ties", [False, True])
def test_accepted_tokens_are_those_that_sorting_keeps(top_p, top_k, spread, ties):
    """Tests every token of every row, including tokens that are practically never sampled."""
    logits = np.random.default_rng(0).normal(scale=spread, size=(50, 300)).astype(np.float32)
    if ties:
        logits = np.round(logits * 4) / 4
    expected = np.stack([reference_kept(softmax(row), top_p, top_k) for row in logits])
    p = jnp.exp(jnp.asarray(logits - logits.max(axis=1, keepdims=True))).T[None]  # A single block.
    if top_k:
        p = jax.jit(token_sampling.keep_top_k, static_argnums=1)(p, top_k)
    above = jax.vmap(lambda floor: token_sampling.mass_above(p, floor)[0])(p[0])
    accepted = above < top_p * p.sum(axis=(0, 1))[None] if top_p < 1 else True
    found = np.asarray(accepted & (p[0] > 0)).T
    np.testing.assert_array_equal(found, expected)
    if top_k and not ties:
        assert (expected.sum(axis=1) <= top_k).all()


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, {0, 1, 2, 3}),
        (1.0, 2, {1, 3}),
        (0.39, 0, {1}),
        (0.41, 0, {1, 3}),
        (0.91, 0, {0, 1, 2, 3}),
        (0.75, 3, {1, 3}),  # Tokens 1 and 3 have 0.7 of the remaining mass of 0.9.
    ],
)
def test_filters_keep_the_expected_tokens(top_p, top_k, kept):
    assert set(draw(np.log([0.1, 0.4, 0.2, 0.3]), draws=500, top_p=top_p, top_k=top_k)[0].tolist()) == kept


def test_temperature_0_selects_the_first_most_likely_token():
    logits = np.minimum(random_logits(3 * BLOCK - 50, ties=True), 2)
    assert (logits == logits.max()).sum() > 1
    tokens, logprobs = draw(logits, draws=5, temperature=0.0)
    np.testing.assert_array_equal(tokens, np.argmax(logits))
    np.testing.assert_allclose(logprobs, np.log(softmax(logits).max()), atol=1e-6)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_a_sampled_token_depends_only_on_its_seed_and_index(top_p):
    logits = jnp.asarray(np.stack([random_logits(50, seed=seed) for seed in range(40)], axis=1))
    seeds, indices = jnp.arange(40, dtype=jnp.uint32) % 10, jnp.arange(40, dtype=jnp.int32) // 5
    settings = {"temperature": 1.0, "top_p": top_p, "top_k": 0}
    together, _, _ = sample_tokens(logits, seeds, indices, independent(len(seeds)), **settings)
    order = np.random.default_rng(0).permutation(40)[:13]
    apart, _, _ = sample_tokens(logits[:, order], seeds[order], indices[order], independent(len(order)), **settings)
    np.testing.assert_array_equal(apart, together[order])
    same = jnp.broadcast_to(logits[:, :1], logits.shape)
    tokens = np.asarray(sample_tokens(same, seeds, indices, independent(len(seeds)), **settings)[0])
    assert len(set(tokens.tolist())) > 5


def test_uniform_numbers_are_uniform_and_independent():
    seeds, indices = jnp.arange(40_000, dtype=jnp.uint32) // 200, jnp.arange(40_000, dtype=jnp.int32) % 200
    for attempt in (0, 1):
        u, w = map(np.asarray, token_sampling.two_uniforms(seeds, indices, attempt))
        assert min(u.min(), w.min()) >= 0 and max(u.max(), w.max()) < 1
        cells = np.histogram2d(u, w, bins=10, range=[[0, 1], [0, 1]])[0]
        assert abs(((cells - 400) ** 2 / 400).sum() - 99) < 4.5 * np.sqrt(2 * 99)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.025


def test_tokens_without_weight_are_never_sampled():
    weights = np.zeros((64, 3000), np.float32)
    rng = np.random.default_rng(0)
    weights[rng.integers(0, 64, (5, 3000)), np.arange(3000)] = rng.exponential(size=(5, 3000))
    for u in (0.0, 0.5, 1 - 2.0**-24):
        index = np.asarray(token_sampling.invert(jnp.asarray(weights), jnp.full(3000, u, jnp.float32))[0])
        assert (weights[index, np.arange(3000)] > 0).all()
        if u == 0:
            np.testing.assert_array_equal(index, (weights > 0).argmax(axis=0))
