"""Tests of pass@n, pass@k training and PKPO against enumeration, exact rationals and the authors' definitions."""

import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest

from poly_epo_jax.set_rl import (
    enumerate_sets,
    grpo_advantages,
    marginal_set_advantages,
    pass_at_n,
    pass_at_n_advantages,
    passk_advantages,
    pkpo_advantages,
)

FAST_COMPILE = {"xla_backend_optimization_level": 0}
closed_form = jax.jit(pass_at_n_advantages, static_argnames="set_size", compiler_options=FAST_COMPILE)
passk = jax.jit(passk_advantages, static_argnames="k", compiler_options=FAST_COMPILE)
pkpo = jax.jit(pkpo_advantages, static_argnames="k", compiler_options=FAST_COMPILE)

SHAPES = [(N, k) for N in (3, 5, 8) for k in range(1, N)]


def random_rewards(rng, num_prompts, num_generations):
    """Returns rewards that are binary, graded with ties, or all different, for a third of the prompts each."""
    rewards = rng.random((num_prompts, num_generations))
    rewards[::3] = rewards[::3] > rng.random((len(rewards[::3]), 1))
    rewards[1::3] = rng.integers(0, 4, rewards[1::3].shape) / 4
    return rewards.astype(np.float32)


def best_of_sets(rewards, k):
    """Returns all sets of k generations of one prompt, and their maximum rewards."""
    sets = list(itertools.combinations(range(len(rewards)), k))
    return sets, np.array([max(rewards[i] for i in members) for members in sets])


def by_every_set(rewards, k):
    """Computes the marginal set advantages, their standardized form, and PKPO's advantages from the definitions."""
    rewards = rewards.astype(np.float64).tolist()
    sets, best = best_of_sets(rewards, k)
    spread = best.std()
    marginal, added = np.zeros(len(rewards)), np.zeros(len(rewards))
    for i in range(len(rewards)):
        holding = [row for row, members in enumerate(sets) if i in members]
        marginal[i] = best[holding].mean() - best.mean()
        if k > 1:
            without = [max(rewards[j] for j in sets[row] if j != i) for row in holding]
            added[i] = (best[holding] - without).sum() / len(sets)
    return marginal, marginal / spread if spread > 1e-12 else np.zeros(len(rewards)), added


@pytest.mark.parametrize(("num_generations", "k"), SHAPES)
def test_advantages_equal_enumeration(num_generations, k):
    rewards = random_rewards(np.random.default_rng([num_generations, k]), 60, num_generations)
    marginal, standardized, added = np.stack([by_every_set(r, k) for r in rewards], axis=1)
    np.testing.assert_allclose(closed_form(rewards, k), marginal, rtol=0, atol=1e-6)
    np.testing.assert_allclose(passk(rewards, k), standardized, rtol=1e-5, atol=1e-6)
    if k > 1:
        np.testing.assert_allclose(pkpo(rewards, k), added, rtol=0, atol=1e-6)


def test_the_closed_form_equals_the_marginal_set_advantage():
    rewards = random_rewards(np.random.default_rng(0), 12, 8)
    enumerated = marginal_set_advantages(pass_at_n, enumerate_sets(8, 4), rewards=rewards)
    np.testing.assert_allclose(closed_form(rewards, 4), enumerated, rtol=0, atol=1e-6)


def test_advantages_by_hand():
    """One of three generations is correct, and two of the three pairs contain it."""
    rewards = np.array([[0, 1, 0]], np.float32)
    np.testing.assert_allclose(closed_form(rewards, 2), [[-1 / 6, 1 / 3, -1 / 6]], atol=1e-7)
    spread = math.sqrt(2 / 3 * 1 / 3)
    np.testing.assert_allclose(passk(rewards, 2), np.array([[-1 / 6, 1 / 3, -1 / 6]]) / spread, rtol=1e-6)
    np.testing.assert_allclose(pkpo(rewards, 2), [[0, 2 / 3, 0]], rtol=1e-6)  # in two of three pairs
    np.testing.assert_allclose(pkpo(rewards, 3), [[0, 1, 0]], rtol=1e-6)


def exact(rewards, k):
    """Computes marginal set advantages, the variance of set scores, and PKPO's advantages of one prompt as rationals.

    Sums are over integers, in a unit that divides all rewards, because sums of fractions take several times as long.
    """
    N = len(rewards)
    rewards = [Fraction(float(reward)) for reward in rewards]
    unit = Fraction(1, max(reward.denominator for reward in rewards))
    whole = [int(reward / unit) for reward in rewards]
    order = sorted(range(N), key=lambda i: whole[i])
    ranked = [whole[i] for i in order]
    total = math.comb(N, k)
    having = [math.comb(j, k - 1) for j in range(N)]  # number of sets whose best generation has rank j
    mean = Fraction(sum(sets * r for sets, r in zip(having, ranked, strict=True)), total)
    variance = Fraction(sum(sets * r * r for sets, r in zip(having, ranked, strict=True)), total) - mean**2
    marginal, added = [Fraction(0)] * N, [Fraction(0)] * N
    for place, i in enumerate(order):
        best = math.comb(place, k - 1) * ranked[place]
        best += sum(math.comb(j - 1, k - 2) * ranked[j] for j in range(place + 1, N)) if k > 1 else 0
        marginal[i] = (Fraction(best, math.comb(N - 1, k - 1)) - mean) * unit
        if k > 1:
            steps = sum(math.comb(j, k - 2) * (ranked[place] - ranked[j]) for j in range(place))
            added[i] = Fraction(steps, total) * unit
    return marginal, variance * unit**2, added


def adversarial_rewards(rng, N):
    one = np.arange(N) == rng.integers(N)
    return np.array(
        [
            rng.random(N) < 0.5,
            one,
            ~one,
            rng.random(N) < 0.05,
            1 - 1e-4 * rng.random(N),
            rng.random(N),
            rng.integers(0, 3, N) / 2,
            np.where(one, 1, 1e-6 * rng.random(N)),
            np.full(N, 0.7),
        ],
        np.float32,
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_generations", [17, 64, 256])
def test_advantages_are_exact_at_any_group_size(num_generations):
    """Errors are within 1e-5 of the largest value of a prompt."""
    rng, N = np.random.default_rng(num_generations), num_generations
    for k in (2, N // 3, N - 1):
        rewards = adversarial_rewards(rng, N)
        ours = closed_form(rewards, k), pkpo(rewards, k), passk(rewards, k)
        for row, values in enumerate(zip(*map(np.asarray, ours), strict=True)):
            marginal, variance, added = exact(rewards[row], k)
            standardized = [float(value) / math.sqrt(variance or 1) for value in marginal]
            for found, expected in zip(values, (marginal, added, standardized), strict=True):
                expected = np.array(expected, float)
                largest = np.abs(expected).max()
                assert np.isfinite(found).all()
                if largest > 1e-12:  # its square is also in the range of float32
                    assert np.abs(found - expected).max() <= 1e-5 * largest, (k, row)
                else:
                    assert np.abs(found).max() <= 1e-11


def test_the_rationals_equal_enumeration():
    rng = np.random.default_rng(5)
    for k in range(1, 6):
        rewards = random_rewards(rng, 3, 6)
        for row in rewards:
            marginal, _, added = exact(row, k)
            expected = by_every_set(row, k)
            np.testing.assert_allclose(np.array(marginal, float), expected[0], atol=1e-12)
            np.testing.assert_allclose(np.array(added, float), expected[2], atol=1e-12)


@pytest.mark.parametrize("num_correct", range(9))
def test_passk_equals_the_definition_of_its_authors(num_correct):
    """The formula is that for 0/1 rewards, without the 1e-6 in the denominator if the denominator is not 0."""
    N, k, c = 8, 3, num_correct
    rewards = np.array([[1] * c + [0] * (N - c)], np.float32)
    R = 1 - math.comb(N - c, k) / math.comb(N, k)
    s = math.sqrt(R * (1 - R)) or 1.0
    correct = (1 - R) / s
    incorrect = (1 - R - (math.comb(N - c - 1, k - 1) if c < N else 0) / math.comb(N - 1, k - 1)) / s
    np.testing.assert_allclose(passk(rewards, k), [[correct] * c + [incorrect] * (N - c)], rtol=1e-5, atol=1e-6)


def test_pkpo_equals_the_listing_of_the_paper():
    """The listing computes the difference of two sums over sets, with and without the generation."""
    rng, N = np.random.default_rng(7), 9
    rewards = random_rewards(rng, 12, N)
    for k in (2, 4, 9):
        expected = np.zeros_like(rewards, dtype=np.float64)
        for row, i in itertools.product(range(len(rewards)), range(N)):
            others = np.sort(np.delete(rewards[row].astype(np.float64), i))
            # In comb(j, k - 2) sets of k - 1 others, the best has rank j. With i, the best is the better of the two.
            sets = np.array([math.comb(j, k - 2) for j in range(N - 1)])
            with_i = (sets * np.maximum(others, rewards[row, i])).sum()
            expected[row, i] = (with_i - (sets * others).sum()) / math.comb(N, k)
        np.testing.assert_allclose(pkpo(rewards, k), expected, atol=1e-6)


def test_pkpo_of_max_rl_is_scaled_and_centered():
    """tajwarfahim/maxrl gives C(N-c, k-1) / C(N-1, k-1) to correct generations, minus the mean of the others."""
    rng, N, k = np.random.default_rng(8), 8, 3
    rewards = (rng.random((16, N)) < 0.4).astype(np.float32)
    weight = np.array([math.comb(N - int(row.sum()), k - 1) / math.comb(N - 1, k - 1) for row in rewards])
    theirs = rewards * weight[:, None]
    theirs = (theirs * N - theirs.sum(axis=1, keepdims=True)) / (N - 1)
    ours = np.asarray(pkpo(rewards, k)) * N / k
    ours = ours - (ours.sum(axis=1, keepdims=True) - ours) / (N - 1)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(("N", "k", "rate", "ratio"), [(8, 4, 0.9, 1 / 7.9), (16, 2, 0.3, 2.3)])
def test_the_variance_of_pkpo_is_not_always_the_smallest(N: int, k: int, rate: float, ratio: float):
    """Compares with a baseline of k other generations, for a policy with one logit. The sum over c is exact."""

    def solved(n: int, c: int, k: int) -> float:
        return 1 - math.comb(n - c, k) / math.comb(n, k)

    counts = np.arange(N + 1)
    chance = np.array([math.comb(N, c) * rate**c * (1 - rate) ** (N - c) for c in range(N + 1)])
    ours = np.asarray(pkpo((np.arange(N) < counts[:, None]).astype(np.float32), k), np.float64)
    theirs = np.zeros((N + 1, N))
    for c in range(N + 1):
        theirs[c, :c] = [k / N * (1 - solved(N - 1, c - 1, k))] * c
        theirs[c, c:] = [k / N * (solved(N - 1, c, k - 1) - solved(N - 1, c, k))] * (N - c) if c < N else []
    score = np.where(np.arange(N) < counts[:, None], 1 - rate, -rate)
    gradients = (ours * score).sum(axis=1), (theirs * score).sum(axis=1)
    means = [chance @ gradient for gradient in gradients]
    assert means == pytest.approx([k * rate * (1 - rate) ** k] * 2, rel=1e-4)
    variances = [chance @ (gradient - mean) ** 2 for gradient, mean in zip(gradients, means, strict=True)]
    assert variances[0] / variances[1] == pytest.approx(ratio, rel=0.02)


def test_pkpo_is_unbiased_for_the_gradient_of_the_best_of_k():
    """Compares sum_i s_i grad log pi(y_i) of a softmax policy over four outcomes with the exact grad E[max of k]."""
    N, k, num_draws = 4, 3, 100_000
    policy = np.exp([0.5, -0.3, 0.0, -1.0]) / np.exp([0.5, -0.3, 0.0, -1.0]).sum()
    reward = np.array([0.0, 1.0, 0.25, 0.75])
    target = np.zeros(4)
    for outcomes in itertools.product(range(4), repeat=k):
        chance = np.prod([policy[y] for y in outcomes])
        target += chance * max(reward[y] for y in outcomes) * sum(np.eye(4)[y] - policy for y in outcomes)
    outcomes = np.random.default_rng(0).choice(4, size=(num_draws, N), p=policy)
    s = np.asarray(pkpo(reward[outcomes].astype(np.float32), k), np.float64)
    estimates = np.einsum("ri,rio->ro", s, np.eye(4)[outcomes] - policy)
    standard_error = estimates.std(axis=0) / math.sqrt(num_draws)
    assert np.abs(target).max() > 20 * standard_error.max()
    assert (np.abs(estimates.mean(axis=0) - target) < 4 * standard_error).all()


def test_best_of_one_is_grpo():
    rewards = random_rewards(np.random.default_rng(9), 6, 7)
    np.testing.assert_allclose(closed_form(rewards, 1), grpo_advantages(rewards), atol=1e-6)


def test_equal_rewards_get_equal_advantages():
    rewards = np.array([[0.5, 1, 0.5, 0, 1, 0]], np.float32)
    for advantages in (closed_form(rewards, 2), passk(rewards, 2), pkpo(rewards, 2)):
        (row,) = np.asarray(advantages)
        assert row[0] == row[2] and row[1] == row[4] and row[3] == row[5] and len(set(row.tolist())) == 3


@pytest.mark.parametrize(("k", "message"), [(0, "set_size=0"), (4, "num_generations=4 must exceed")])
def test_invalid_set_sizes_are_rejected(k, message):
    rewards = np.zeros((1, 4), np.float32)
    for advantages in (pass_at_n_advantages, passk_advantages):
        with pytest.raises(ValueError, match=message):
            advantages(rewards, k)
    for k in (0, 1, 5):
        with pytest.raises(ValueError, match=rf"k={k} must lie between 2 and num_generations=4"):
            pkpo_advantages(rewards, k)
