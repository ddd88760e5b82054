"""Tests of advantages against a float64 brute force over all sets, and of the identities of the method."""

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from poly_epo_jax.set_rl import (
    DEGENERATE_CLUSTER,
    enumerate_sets,
    exploration_exploitation_synergy,
    grpo_advantages,
    grpo_div_advantages,
    marginal_set_advantages,
    mean_reward,
    pass_at_n,
    pass_at_n_advantages,
    polychromic,
    polychromic_advantages,
    sample_sets,
)

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # for small programs, compiling takes longer than running
closed_form = jax.jit(polychromic_advantages, static_argnames="set_size", compiler_options=FAST_COMPILE)
marginal = jax.jit(marginal_set_advantages, static_argnames="objective", compiler_options=FAST_COMPILE)

PROMPTS_PER_SHAPE = 63  # 1,008 cases for the 16 shapes that are not marked slow
SHAPES = [
    pytest.param(N, n, marks=[] if N in (3, 4, 5, 8) else pytest.mark.slow) for N in range(3, 10) for n in range(1, N)
]


def random_group(rng, num_prompts, num_generations):
    """Returns rewards, binary for half of the prompts, and clusters, some of which are degenerate."""
    rewards = rng.random((num_prompts, num_generations)) * 2 - 0.5
    rewards[::2] = rewards[::2] > 0.5
    ids = np.array([0, 1, 2, 3, 17, DEGENERATE_CLUSTER])
    clusters = ids[rng.integers(0, rng.integers(1, 7, (num_prompts, 1)), (num_prompts, num_generations))]
    clusters[1::3] = ids[::-1][rng.integers(0, 3, clusters[1::3].shape)]
    return rewards.astype(np.float32), clusters


def brute_force(rewards, clusters, sets):
    """Computes (A_marg, product, synergy) of each generation of a prompt from the definitions in the paper."""
    rewards, clusters = rewards.astype(np.float64).tolist(), clusters.tolist()
    R = np.array([sum(rewards[i] for i in members) / len(members) for members in sets])
    d = np.array([len({clusters[i] for i in members} - {DEGENERATE_CLUSTER}) / len(members) for members in sets])

    def cov(keep):
        return ((R[keep] - R[keep].mean()) * (d[keep] - d[keep].mean())).mean()

    everything = np.ones(len(sets), bool)
    advantages = np.zeros((len(rewards), 3))
    for y in range(len(rewards)):
        holds = np.array([y in members for members in sets])
        if holds.any():
            product = R[holds].mean() * d[holds].mean() - R.mean() * d.mean()
            advantages[y] = (R * d - (R * d).mean())[holds].mean(), product, cov(holds) - cov(everything)
    return advantages.T


@pytest.mark.parametrize(("num_generations", "set_size"), SHAPES)
def test_advantages_equal_brute_force(num_generations, set_size):
    rng = np.random.default_rng([num_generations, set_size])
    rewards, clusters = random_group(rng, PROMPTS_PER_SHAPE, num_generations)
    every_set = list(itertools.combinations(range(num_generations), set_size))
    num_sets = int(rng.integers(1, len(every_set) + 1))
    some_sets = np.array([rng.permutation(every_set)[:num_sets] for _ in rewards])

    def ours(rewards, clusters, some_sets):
        features = {"rewards": rewards, "clusters": clusters}
        return (
            marginal_set_advantages(polychromic, enumerate_sets(num_generations, set_size), **features),
            marginal_set_advantages(polychromic, some_sets, **features),
            polychromic_advantages(rewards, clusters, set_size),
            exploration_exploitation_synergy(rewards, clusters, set_size),
        )

    jitted = jax.jit(ours, compiler_options=FAST_COMPILE)
    enumerated, sampled, closed, (product, synergy) = jitted(rewards, clusters, some_sets)
    expected = [brute_force(r, c, every_set) for r, c in zip(rewards, clusters, strict=True)]
    A_marg, expected_product, expected_synergy = np.stack(expected, axis=1)
    np.testing.assert_allclose(enumerated, A_marg, rtol=0, atol=1e-6)
    np.testing.assert_allclose(closed, A_marg, rtol=0, atol=1e-6)
    np.testing.assert_allclose(product, expected_product, rtol=0, atol=1e-6)
    np.testing.assert_allclose(synergy, expected_synergy, rtol=0, atol=1e-6)
    np.testing.assert_allclose(product + synergy, A_marg, rtol=0, atol=1e-6)

    expected = [brute_force(r, c, s)[0] for r, c, s in zip(rewards, clusters, some_sets, strict=True)]
    np.testing.assert_allclose(sampled, np.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("num_generations", "set_size"), [(8, 4), (5, 1), (6, 5)])
def test_mean_reward_is_scaled_grpo(num_generations, set_size):
    rewards, _ = random_group(np.random.default_rng(0), 16, num_generations)
    advantages = marginal(mean_reward, enumerate_sets(num_generations, set_size), rewards=rewards)
    factor = (num_generations - set_size) / (set_size * (num_generations - 1))
    centered = rewards.astype(np.float64) - rewards.astype(np.float64).mean(-1, keepdims=True)
    np.testing.assert_allclose(advantages, factor * centered, atol=1e-6)
    np.testing.assert_allclose(grpo_advantages(rewards), centered, atol=1e-6)


def test_pass_at_n_gives_no_incorrect_generation_a_positive_advantage():
    rewards = np.array(list(itertools.product([0, 1], repeat=6)), np.float32)
    advantages = np.asarray(marginal(pass_at_n, enumerate_sets(6, 3), rewards=rewards))
    assert advantages[rewards == 0].max() <= 1e-7
    one_correct = rewards.sum(-1) == 1
    assert (advantages[one_correct] > 0.1)[rewards[one_correct] == 1].all()


def test_advantages_do_not_depend_on_cluster_ids():
    rewards, clusters = random_group(np.random.default_rng(1), 32, 8)
    labels = np.where(np.arange(101) == DEGENERATE_CLUSTER, DEGENERATE_CLUSTER, 500 - np.arange(101))
    relabeled = labels[clusters]
    assert (relabeled != clusters).any()
    np.testing.assert_array_equal(closed_form(rewards, relabeled, 4), closed_form(rewards, clusters, 4))
    np.testing.assert_array_equal(
        marginal(polychromic, enumerate_sets(8, 4), rewards=rewards, clusters=relabeled),
        marginal(polychromic, enumerate_sets(8, 4), rewards=rewards, clusters=clusters),
    )


@pytest.mark.parametrize(("num_generations", "set_size"), [(8, 4), (256, 16)])
def test_permuting_generations_permutes_advantages(num_generations, set_size):
    rng = np.random.default_rng(2)
    rewards, clusters = random_group(rng, 8, num_generations)
    order = rng.permutation(num_generations)
    advantages = np.asarray(closed_form(rewards, clusters, set_size))
    permuted = np.asarray(closed_form(rewards[:, order], clusters[:, order], set_size))
    assert np.isfinite(advantages).all() and np.abs(advantages).max() > 1e-3
    np.testing.assert_allclose(permuted, advantages[:, order], atol=1e-6)
    np.testing.assert_allclose(advantages.mean(-1), 0, atol=1e-6)


@pytest.mark.parametrize("cluster", [3, DEGENERATE_CLUSTER])
def test_identical_generations_have_zero_advantage(cluster):
    rewards, clusters = np.full((2, 8), 0.7, np.float32), np.full((2, 8), cluster)
    np.testing.assert_array_equal(closed_form(rewards, clusters, 4), np.zeros((2, 8)))
    enumerated = marginal(polychromic, enumerate_sets(8, 4), rewards=rewards, clusters=clusters)
    np.testing.assert_array_equal(enumerated, np.zeros((2, 8)))


def test_an_incorrect_generation_with_a_new_strategy_has_a_positive_advantage():
    """Four correct and three incorrect generations share a strategy. The last, incorrect one has another strategy."""
    rewards = np.array([[1, 1, 1, 1, 0, 0, 0, 0]], np.float32)
    clusters = np.array([[0, 0, 0, 0, 0, 0, 0, 1]])
    advantages = np.asarray(closed_form(rewards, clusters, 4))[0]
    assert advantages[7] > 0 > advantages[4]
    degenerate = np.asarray(closed_form(rewards, np.where(clusters == 1, DEGENERATE_CLUSTER, 0), 4))[0]
    assert degenerate[7] < 0


@pytest.mark.parametrize("num_generations", [64, 256])
def test_closed_form_of_special_cases_at_any_group_size(num_generations):
    """With distinct clusters, f is the mean reward. With a single cluster, f is the mean reward divided by n."""
    set_size = num_generations // 16
    rewards = np.random.default_rng(3).random((3, num_generations)).astype(np.float32)
    scaled = (num_generations - set_size) / (set_size * (num_generations - 1)) * np.asarray(grpo_advantages(rewards))
    distinct = np.broadcast_to(np.arange(1000, 1000 + num_generations), rewards.shape)
    np.testing.assert_allclose(closed_form(rewards, distinct, set_size), scaled, atol=1e-6)
    same = np.zeros_like(distinct)
    np.testing.assert_allclose(closed_form(rewards, same, set_size), scaled / set_size, atol=1e-6)


def exact_advantages(rewards, clusters, set_size):
    """Computes the advantages of one prompt as rational numbers, by counting sets per cluster."""
    N, n, clusters = len(rewards), set_size, clusters.tolist()
    rewards = [Fraction(reward) for reward in rewards.tolist()]
    denominator = max(reward.denominator for reward in rewards)  # denominators of floats are powers of two
    rewards = [int(reward * denominator) for reward in rewards]
    ids = set(clusters) - {DEGENERATE_CLUSTER}
    sizes = {c: clusters.count(c) for c in ids}
    sums = {c: sum(r for r, own in zip(rewards, clusters, strict=True) if own == c) for c in ids}

    def choose(pool, drawn):
        return math.comb(pool, drawn) if min(pool, drawn) >= 0 else 0

    holding, both = choose(N - 1, n - 1), choose(N - 2, n - 2)  # sets with y; sets with y and another generation
    missing = {c: (choose(N - 1 - size, n - 1), choose(N - 2 - size, n - 2)) for c, size in sizes.items()}
    totals = []
    for reward, own in zip(rewards, clusters, strict=True):
        others = sum(rewards) - reward
        everything = reward * holding + others * both
        missed = (reward * missing[c][0] + (others - sums[c]) * missing[c][1] for c in ids if c != own)
        totals.append(len(ids) * everything - sum(missed))
    return [Fraction(N * total - sum(totals), N * denominator * holding * n * n) for total in totals]


def adversarial_groups(rng, num_generations):
    """Yields combinations of difficult rewards (nearly equal, all but one equal, given by clusters) and clusters."""
    N = num_generations
    one = np.arange(N) == rng.integers(N)
    sizes = np.minimum(rng.geometric(0.3, N), rng.integers(1, N + 1))  # a few large and some small clusters
    all_clusters = [
        rng.integers(0, 3, N),
        sizes,
        np.arange(N) // 2,
        np.where(one, 1, 2),
        np.where(rng.random(N) < 0.9, DEGENERATE_CLUSTER, sizes),
    ]
    for clusters in all_clusters:
        clusters = np.where(clusters == DEGENERATE_CLUSTER, clusters, clusters + 1000)
        clusters[one] = rng.choice([clusters[0], DEGENERATE_CLUSTER])
        for rewards in (
            rng.random(N) < rng.random(),
            one,
            ~one,
            np.ones(N),
            1 - 1e-4 * rng.random(N),
            rng.random(N),
            clusters % 7 / 7,
            np.full(N, 0.7),
        ):
            yield np.asarray(rewards, np.float32), clusters


@pytest.mark.parametrize("num_generations", [3, 17, 64, 256])
def test_closed_form_is_exact_for_all_set_sizes(num_generations):
    """The error is within 1e-4 of the largest advantage, which is below 1e-5 for sets of 255 of 256 generations."""
    rng = np.random.default_rng(num_generations)
    N = num_generations
    for set_size in sorted({1, 2, N // 3, N - 2, N - 1} & set(range(1, N))):
        rewards, clusters = map(np.stack, zip(*adversarial_groups(rng, N), strict=True))
        found = np.asarray(polychromic_advantages(rewards, clusters, set_size), np.float64)
        for *group, advantages in zip(rewards, clusters, found, strict=True):
            expected = np.array(exact_advantages(group[0], group[1], set_size), np.float64)
            largest = np.abs(expected).max()
            assert np.abs(advantages - expected).max() <= (1e-4 * largest or 1e-7), (set_size, *group)


def test_exact_advantages_equal_brute_force():
    rng = np.random.default_rng(7)
    for set_size in range(1, 6):
        rewards, clusters = (rows[0] for rows in random_group(rng, 1, 6))
        expected, _, _ = brute_force(rewards, clusters, list(itertools.combinations(range(6), set_size)))
        np.testing.assert_allclose(np.array(exact_advantages(rewards, clusters, set_size), float), expected, atol=1e-12)


def test_closed_form_agrees_with_sampling_from_four_billion_sets():
    num_generations, set_size, num_sets = 64, 8, 10_000
    rewards, clusters = random_group(np.random.default_rng(4), 4, num_generations)
    sets = np.asarray(sample_sets(jax.random.key(0), num_generations, set_size, num_sets))
    sampled = marginal(polychromic, sets, rewards=rewards, clusters=clusters)
    exact = np.asarray(closed_form(rewards, clusters, set_size))

    ordered = np.sort(np.where(clusters == DEGENERATE_CLUSTER, -1, clusters)[:, sets], axis=-1)
    num_clusters = (np.diff(ordered, axis=-1, prepend=-1) > 0).sum(-1)
    scores = rewards[:, sets].mean(-1) * num_clusters / set_size
    holds = (sets[..., None] == np.arange(num_generations)).any(1)
    for prompt in range(4):
        # The baseline is estimated from the same sets, which reduces the variance by the fraction n / N.
        spread = np.array([scores[prompt, holds[:, y]].std() for y in range(num_generations)])
        standard_error = spread * np.sqrt((1 - set_size / num_generations) / holds.sum(0))
        z = (np.asarray(sampled[prompt]) - exact[prompt]) / standard_error
        assert np.abs(z).max() < 4.5
        assert 0.6 < np.mean(z**2) < 1.5


def test_custom_objective_over_embeddings():
    rng = np.random.default_rng(5)
    embeddings = rng.normal(size=(3, 6, 4)).astype(np.float32)
    quality = rng.random((3, 6)).astype(np.float32)

    def spread(embeddings, quality):
        center = embeddings.mean(axis=-2, keepdims=True)
        return jnp.square(embeddings - center).sum(axis=(-2, -1)) * quality.min(axis=-1)

    sets = list(itertools.combinations(range(6), 3))
    scores = np.zeros((3, len(sets)))
    for prompt, (row, members) in itertools.product(range(3), enumerate(sets)):
        points = embeddings[prompt, members].astype(np.float64)
        scores[prompt, row] = ((points - points.mean(0)) ** 2).sum() * quality[prompt, members].min()
    expected = np.zeros((3, 6))
    for prompt, y in itertools.product(range(3), range(6)):
        held = [scores[prompt, row] for row, members in enumerate(sets) if y in members]
        expected[prompt, y] = np.mean(held) - scores[prompt].mean()

    advantages = marginal(spread, enumerate_sets(6, 3), embeddings=embeddings, quality=quality)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)


def test_a_generation_in_no_set_has_zero_advantage():
    rewards = np.array([[1, 0, 0, 1]], np.float32)
    sets = np.array([[0, 1], [1, 2]])
    advantages = marginal(mean_reward, sets, rewards=rewards)
    np.testing.assert_allclose(advantages, [[0.25, 0.0, -0.25, 0.0]], atol=1e-7)


@pytest.mark.slow
def test_jit_does_not_change_advantages():
    rewards, clusters = random_group(np.random.default_rng(6), 32, 8)
    eager = polychromic_advantages(rewards, clusters, 4)
    np.testing.assert_allclose(closed_form(rewards, clusters, 4), eager, atol=1e-6)
    features = {"rewards": rewards, "clusters": clusters}
    eager = marginal_set_advantages(polychromic, enumerate_sets(8, 4), **features)
    np.testing.assert_allclose(marginal(polychromic, enumerate_sets(8, 4), **features), eager, atol=1e-6)


def test_grpo_div_by_hand():
    """The degenerate response earns no bonus, although it is rare."""
    rewards = np.array([[1, 0, 0, 0, 1]], np.float32)
    clusters = np.array([[1, 1, 2, DEGENERATE_CLUSTER, 1]])
    bonus = np.array([(5 / 3 - 1) / 4, (5 / 3 - 1) / 4, 1.0, 0.0, (5 / 3 - 1) / 4])
    shaped = rewards[0] + 0.5 * bonus
    np.testing.assert_allclose(grpo_div_advantages(rewards, clusters, 0.5), (shaped - shaped.mean())[None], atol=1e-6)
    np.testing.assert_allclose(grpo_div_advantages(rewards, clusters, 0.0), grpo_advantages(rewards), atol=1e-7)


ON_ALL_ADVANTAGES = pytest.mark.parametrize(
    "advantages",
    [
        lambda r, c: polychromic_advantages(r, c, 2),
        lambda r, c: exploration_exploitation_synergy(r, c, 2),
        lambda r, c: grpo_div_advantages(r, c, 0.5),
        lambda r, c: marginal_set_advantages(polychromic, enumerate_sets(4, 2), rewards=r, clusters=c),
    ],
    ids=["polychromic", "synergy", "grpo_div", "marginal"],
)


@ON_ALL_ADVANTAGES
def test_nan_rewards_are_rejected(advantages):
    rewards = np.array([[1, 0, np.nan, 0]], np.float32)
    with pytest.raises(ValueError, match="rewards contains NaN"):
        advantages(rewards, np.zeros((1, 4), int))
    with pytest.raises(ValueError, match="rewards contains NaN"):
        grpo_advantages(rewards)


@ON_ALL_ADVANTAGES
def test_mismatched_shapes_are_rejected(monkeypatch, advantages):
    monkeypatch.setattr(
        jaxtyping.config, "jaxtyping_disable", True
    )  # as outside the tests, where jaxtyping does not check shapes
    with pytest.raises(ValueError, match=r"\[P, N\].*\(1, 4\).*\(1, 5\)"):
        advantages(np.zeros((1, 4), np.float32), np.zeros((1, 5), int))
    with pytest.raises(ValueError, match=r"\[P, N\].*\(4,\)"):
        advantages(np.zeros(4, np.float32), np.zeros(4, int))


@pytest.mark.parametrize("advantages", [polychromic_advantages, exploration_exploitation_synergy])
@pytest.mark.parametrize(
    ("set_size", "message"),
    [(0, "set_size=0"), (4, "num_generations=4 must exceed set_size=4")],
)
def test_invalid_set_sizes_are_rejected(advantages, set_size, message):
    with pytest.raises(ValueError, match=message):
        advantages(np.zeros((1, 4), np.float32), np.zeros((1, 4), int), set_size)


def test_sets_of_invalid_shape_are_rejected(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    rewards = np.zeros((2, 4), np.float32)
    for sets in (np.zeros(2, int), np.zeros((3, 5, 2), int)):
        with pytest.raises(ValueError, match=r"\[K, n\] or \[2, K, n\]"):
            marginal_set_advantages(mean_reward, sets, rewards=rewards)
    with pytest.raises(ValueError, match="num_generations=4 must exceed set_size=5"):
        marginal_set_advantages(mean_reward, np.zeros((3, 5), int), rewards=rewards)


@pytest.mark.parametrize(
    ("returned", "described"),
    [
        (lambda rewards: rewards, r"an array of shape \(6, 2\)"),
        (lambda rewards: None, "a NoneType"),
        (lambda rewards: [rewards.max(axis=-1)], "a list"),
        (lambda rewards: (rewards.max(axis=-1), 1), "a tuple"),
        (lambda rewards: 1.0, "a float"),
    ],
)
def test_an_objective_must_return_one_score_per_set(returned, described):
    def mine(rewards):
        return returned(rewards)

    with pytest.raises(ValueError, match=rf"^The objective mine returned {described}, .* \[K\]; return an array"):
        marginal_set_advantages(mine, enumerate_sets(4, 2), rewards=np.zeros((1, 4), np.float32))


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_scores_that_are_not_floats_are_converted(dtype):
    rewards = np.array([[1, 0, 0, 0]], np.float32)
    found = marginal_set_advantages(
        lambda rewards: pass_at_n(rewards).astype(dtype), enumerate_sets(4, 2), rewards=rewards
    )
    np.testing.assert_array_equal(found, marginal_set_advantages(pass_at_n, enumerate_sets(4, 2), rewards=rewards))


@pytest.mark.parametrize("objective", [polychromic, pass_at_n, mean_reward])
def test_sets_without_the_response_are_a_baseline(objective):
    """The mean score with the response minus that without it is A N / (N - n) (docs/explanation/theory.md)."""
    num_generations, set_size = 6, 4
    rewards, clusters = random_group(np.random.default_rng(7), 12, num_generations)
    features = {"rewards": rewards} | ({"clusters": clusters} if objective is polychromic else {})
    sets = enumerate_sets(num_generations, set_size)
    members = [np.asarray(values)[:, np.asarray(sets)] for values in features.values()]
    scores = np.asarray(objective(*members), np.float64)
    differences = np.stack(
        [
            scores[:, holds].mean(axis=1) - scores[:, ~holds].mean(axis=1)
            for holds in (np.any(np.asarray(sets) == i, axis=1) for i in range(num_generations))
        ],
        axis=1,
    )
    advantages = np.asarray(marginal_set_advantages(objective, sets, **features))
    scale = num_generations / (num_generations - set_size)
    np.testing.assert_allclose(differences, scale * advantages, rtol=0, atol=2e-6)


def test_replacing_the_response_by_each_other_one_gives_the_same_baseline():
    """The mean over other responses j, and sets without i and j, of max with i minus max with j (MaxPO, theory.md)."""
    num_generations, set_size = 7, 4
    rewards = np.random.default_rng(8).random(num_generations).astype(np.float32)
    differences = np.array(
        [
            np.mean(
                [
                    max(rewards[i], rest) - max(rewards[j], rest)
                    for j in {*range(num_generations)} - {i}
                    for rest in map(max, itertools.combinations(np.delete(rewards, [i, j]), set_size - 1))
                ]
            )
            for i in range(num_generations)
        ]
    )
    scale = num_generations / (num_generations - set_size)
    (advantages,) = np.asarray(pass_at_n_advantages(rewards[None], set_size))
    np.testing.assert_allclose(differences, scale * advantages, rtol=0, atol=2e-6)
