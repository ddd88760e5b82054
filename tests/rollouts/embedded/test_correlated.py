"""Tests correlated generations on policies whose sequences are enumerable, and in the embedded sampler."""

import jax.numpy as jnp
import numpy as np
import pytest
from fakes import tiny_problems
from samplers import MAX_PROMPT, generate, make_rollouts, token_ids

from poly_epo_jax.rollouts.embedded.token_sampling import group_lattice, sample_tokens

VOCABULARY, LENGTH, CHUNK = 4, 3, 20_000


def random_policy(spread, seed=0):
    """Returns the logits of the next token for each prefix, as arrays [VOCABULARY^t, VOCABULARY] for t < LENGTH."""
    rng = np.random.default_rng(seed)
    return [rng.normal(scale=spread, size=(VOCABULARY**t, VOCABULARY)).astype(np.float32) for t in range(LENGTH)]


def sequence_probabilities(policy, temperature):
    p = np.ones(1)
    for logits in policy:
        weights = np.exp(logits.astype(np.float64) / temperature)
        p = (p[:, None] * weights / weights.sum(axis=1, keepdims=True)).ravel()
    return p


def group_seeds(num_groups, num_generations):
    return np.random.default_rng(5).integers(2**32, size=(num_groups, num_generations), dtype=np.uint32)


def sample(policy, seeds, lattice, temperature=1.0):
    """Samples a sequence for each seed, and returns their numbers, with the last token as the last digit."""
    if len(seeds) > CHUNK:
        parts = range(0, len(seeds), CHUNK)
        return np.concatenate(
            [sample(policy, seeds[i : i + CHUNK], lattice[i : i + CHUNK], temperature) for i in parts]
        )
    prefix, lattice = np.zeros(len(seeds), int), jnp.asarray(lattice)
    for t, logits in enumerate(policy):
        indices = jnp.full(len(seeds), t, jnp.int32)
        columns = jnp.asarray(logits[prefix].T)
        token, _, lattice = sample_tokens(
            columns, jnp.asarray(seeds), indices, lattice, temperature=temperature, top_p=1.0, top_k=0
        )
        prefix = prefix * VOCABULARY + np.asarray(token)
    return prefix


def sample_groups(policy, num_groups, num_generations, temperature=1.0):
    seeds = group_seeds(num_groups, num_generations)
    lattice = np.concatenate([group_lattice(row) for row in seeds])
    return sample(policy, seeds.ravel(), lattice, temperature).reshape(seeds.shape)


def assert_distribution(samples, probabilities):
    """Chi-square test within 4.5 standard deviations, after rare values are joined."""
    expected, counts = probabilities * len(samples), np.bincount(samples, minlength=len(probabilities))
    rare = expected < 10
    expected, counts = (np.append(x[~rare], x[rare].sum()) for x in (expected, counts))
    expected, counts = expected[expected > 0], counts[expected > 0]
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), len(expected) - 1
    assert abs(chi_square - freedom) < 4.5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("num_groups", "num_generations", "temperature"),
    [(2_500, 8, 0.7), pytest.param(40_000, 3, 1.0, marks=pytest.mark.slow)],
)
def test_each_row_has_the_distribution_of_the_policy(num_groups, num_generations, temperature):
    """Rows of a group are dependent, so each test has a single row of each group."""
    policy = random_policy(1.5)
    probabilities = sequence_probabilities(policy, temperature)
    firsts = probabilities.reshape(VOCABULARY, -1).sum(axis=1)
    for row in sample_groups(policy, num_groups, num_generations, temperature).T:
        assert_distribution(row // VOCABULARY ** (LENGTH - 1), firsts)
        assert_distribution(row, probabilities)


def first_pairs(p, num_generations):
    """Returns the probabilities [V, V] of the first tokens of two rows, by quadrature over the shift."""
    points = (np.arange(20_000) + 0.5) / 20_000
    tokens = [
        np.searchsorted(np.cumsum(p)[:-1], (points + m / num_generations) % 1, "right") for m in range(num_generations)
    ]
    pairs = np.zeros((len(p), len(p)))
    for other in tokens[1:]:
        np.add.at(pairs, (tokens[0], other), 1 / len(points) / (num_generations - 1))
    return pairs


@pytest.mark.parametrize("num_generations", [8, pytest.param(3, marks=pytest.mark.slow)])
def test_pairs_of_first_tokens_have_the_probabilities_of_a_lattice(num_generations):
    policy = random_policy(1.0)[:1]
    expected = first_pairs(sequence_probabilities(policy, 1.0), num_generations)
    groups = sample_groups(policy, 2_500, num_generations)
    for i, j in [(0, 1), (num_generations - 1, 1)]:  # The order of rows is random, so all pairs have one distribution.
        assert_distribution(groups[:, i] * VOCABULARY + groups[:, j], expected.ravel())


@pytest.mark.parametrize("num_generations", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 32))])
def test_counts_of_a_sequence_differ_from_their_expectation_by_less_than_one(num_generations):
    """The expected number of distinct sequences then has the maximum of all dependent samples, sum min(1, N p)."""
    policy = random_policy(1.5)
    p = sequence_probabilities(policy, 1.0)
    groups = sample_groups(policy, 2_500, num_generations)
    counts = (groups[:, :, None] == np.arange(len(p))).sum(axis=1)
    limits = np.floor(num_generations * p - 1e-5), np.ceil(num_generations * p + 1e-5)
    assert (counts >= limits[0]).all() and (counts <= limits[1]).all()
    distinct = (counts > 0).sum(axis=1)
    bound, independent = np.minimum(1, num_generations * p).sum(), (1 - (1 - p) ** num_generations).sum()
    assert bound > independent + 0.1
    assert abs(distinct.mean() - bound) < 4.5 * distinct.std() / np.sqrt(len(distinct)) + 1e-3


def test_other_group_sizes_have_other_points():
    seeds = group_seeds(1, 8)[0]
    eight, four = group_lattice(seeds), group_lattice(seeds[:4])
    assert not set(eight[:, 0]) & set(four[:, 0])
    np.testing.assert_allclose(np.diff(np.sort(eight[:, 0])), 1 / 8, atol=1e-6)
    np.testing.assert_array_equal(four[:, 1], 1 / 4)


def test_sampler_spreads_generations_regardless_of_its_slots():
    problems = tiny_problems(6, MAX_PROMPT)
    rollouts, few_slots = make_rollouts(max_concurrent=64), make_rollouts(max_concurrent=10)
    found = token_ids(generate(rollouts, problems, 8, correlated=True))
    assert found == token_ids(generate(few_slots, problems, 8, correlated=True))
    assert found != token_ids(generate(rollouts, problems, 8))
