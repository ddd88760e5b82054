"""Tests of losses against values computed by hand, and of the properties that updates rely on."""

from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from poly_epo_jax.set_rl import (
    LOSSES,
    ZERO_GRADIENT_AT_ZERO_ADVANTAGE,
    Tokens,
    cispo_loss,
    kl_estimate,
    policy_gradient_loss,
    ppo_clip_loss,
    sequence_means,
    token_weights,
)

EAGER_AND_JIT = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
ALL_LOSSES = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
COMPARE_TOKENS = ("clip_cov", "kl_cov")  # losses that compare the tokens of a microbatch

# Six response tokens, followed by a padding token. The advantages of the second and fifth token move their ratios away
# from 1.
RATIO = np.array([1.0, 1.5, 0.5, 1.5, 0.5, 1.1])
ADVANTAGE = np.array([2.0, 1.0, 1.0, -1.0, -1.0, -3.0])
LOGPROB = np.log([0.5, 0.6, 0.1, 0.9, 0.2, 0.3])
WEIGHT = 0.1


def tokens(pad_logprob=0.0, pad_old_logprob=0.0, pad_advantage=0.0):
    """Returns two sequences of three tokens, followed by padding."""
    return Tokens(
        jnp.asarray(np.append(LOGPROB, pad_logprob), jnp.float32),
        jnp.asarray(np.append(LOGPROB - np.log(RATIO), pad_old_logprob), jnp.float32),
        jnp.asarray(np.append(ADVANTAGE, pad_advantage), jnp.float32),
        jnp.asarray(np.append(np.full(6, WEIGHT), 0.0), jnp.float32),
        jnp.array([1, 1, 1, 2, 2, 2, 0]),
    )


def gradient(loss, arguments, transform=lambda f: f):
    """Returns the gradient with respect to the log-probabilities."""

    def value(logprobs):
        return loss(arguments._replace(logprobs=logprobs))[0]

    return np.asarray(transform(jax.grad(value))(arguments.logprobs))


@EAGER_AND_JIT
def test_ppo_clip_by_hand(transform):
    loss, metrics = transform(ppo_clip_loss)(tokens())
    terms = [1.0 * 2, 1.28, 0.5, -1.5, -0.8, 1.1 * -3]
    np.testing.assert_allclose(loss, -WEIGHT * sum(terms), rtol=1e-6)
    assert metrics["clip_fraction"] == 2
    np.testing.assert_allclose(metrics["ratio"], RATIO.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["kl"], (RATIO - 1 - np.log(RATIO)).sum(), rtol=1e-6)

    expected = -WEIGHT * ADVANTAGE * RATIO
    expected[[1, 4]] = 0  # clipped
    np.testing.assert_allclose(gradient(ppo_clip_loss, tokens(), transform), np.append(expected, 0), atol=1e-6)


def test_dual_clip_by_hand():
    """The ratio 1.5 of a token with A < 0 is bounded by 1.2. Positive advantages and smaller ratios are unaffected."""
    loss, metrics = ppo_clip_loss(tokens(), dual_clip=1.2)
    terms = [1.0 * 2, 1.28, 0.5, 1.2 * -1, -0.8, 1.1 * -3]
    np.testing.assert_allclose(loss, -WEIGHT * sum(terms), rtol=1e-6)
    assert metrics["clip_fraction"] == 3
    expected = -WEIGHT * ADVANTAGE * RATIO
    expected[[1, 3, 4]] = 0  # clipped
    found = gradient(partial(ppo_clip_loss, dual_clip=1.2), tokens())
    np.testing.assert_allclose(found, np.append(expected, 0), atol=1e-6)


@EAGER_AND_JIT
def test_cispo_by_hand(transform):
    loss, metrics = transform(cispo_loss)(tokens())
    clipped = np.array([1.0, 1.28, 0.8, 1.28, 0.8, 1.1])
    np.testing.assert_allclose(loss, -WEIGHT * (clipped * ADVANTAGE * LOGPROB).sum(), rtol=1e-6)
    assert metrics["clip_fraction"] == 4
    np.testing.assert_allclose(metrics["ratio"], RATIO.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["kl"], (RATIO - 1 - np.log(RATIO)).sum(), rtol=1e-6)

    expected = -WEIGHT * clipped * ADVANTAGE
    actual = gradient(cispo_loss, tokens(), transform)
    np.testing.assert_allclose(actual, np.append(expected, 0), atol=1e-6)
    assert (actual[:6] != 0).all()


@EAGER_AND_JIT
def test_policy_gradient_by_hand(transform):
    loss, metrics = transform(policy_gradient_loss)(tokens())
    np.testing.assert_allclose(loss, -WEIGHT * (ADVANTAGE * LOGPROB).sum(), rtol=1e-6)
    assert metrics == {}
    expected = np.append(-WEIGHT * ADVANTAGE, 0)
    np.testing.assert_allclose(gradient(policy_gradient_loss, tokens(), transform), expected, atol=1e-7)


def test_clip_range_is_configurable():
    _, metrics = ppo_clip_loss(tokens(), clip_low=0.6, clip_high=0.05)
    assert metrics["clip_fraction"] == 1  # 1.5 with A > 0 is clipped, 0.5 with A < 0 is not
    _, metrics = cispo_loss(tokens(), clip_low=0.6, clip_high=0.05)
    assert metrics["clip_fraction"] == 3  # twice 1.5, and 1.1


@ALL_LOSSES
def test_on_policy_gradients_equal_the_policy_gradient(loss):
    on_policy = tokens()._replace(old_logprobs=tokens().logprobs)
    expected = -np.asarray(on_policy.weights * on_policy.advantages)
    np.testing.assert_allclose(gradient(loss, on_policy), expected, atol=1e-7)


@ALL_LOSSES
@pytest.mark.parametrize("pad", [(-1e9, 0.0, 3.0), (-np.inf, -np.inf, 1e30), (0.0, 0.0, np.nan), (np.nan,) * 3])
def test_masked_tokens_have_no_effect(loss, pad):
    value, metrics = loss(tokens(*pad))
    clean_value, clean_metrics = loss(Tokens(*(array[:6] for array in tokens())))
    np.testing.assert_allclose(value, clean_value, rtol=1e-6)
    for name, clean in clean_metrics.items():
        np.testing.assert_allclose(metrics[name], clean, rtol=1e-6)
    gradients = gradient(loss, tokens(*pad))
    assert gradients[6] == 0
    np.testing.assert_allclose(gradients[:6], gradient(loss, tokens())[:6], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [LOSSES[name] for name in LOSSES if name not in COMPARE_TOKENS])
def test_losses_of_microbatches_add_up(loss):
    rng = np.random.default_rng(0)
    logprobs = -rng.random((4, 6))
    arrays = (logprobs, logprobs + rng.normal(0, 0.3, (4, 6)), rng.normal(size=(4, 6)), rng.random((4, 6)) > 0.3)
    ids = jnp.tile(jnp.array([1, 1, 2, 2, 2, 0]), (4, 1))
    batch = Tokens(*[*(jnp.asarray(array, jnp.float32) for array in arrays), ids])
    whole = loss(batch)
    parts = [loss(Tokens(*(array[rows] for array in batch))) for rows in (slice(0, 1), slice(1, 4))]
    assert jax.tree.structure(whole) == jax.tree.structure(parts[0])
    summed = jax.tree.map(lambda first, second: first + second, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, summed)


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantage_sequences_have_no_effect_on_some_losses(name):
    """Removing the sequence changes neither the loss nor a bit of the gradient, and its own gradient is 0."""
    rng = np.random.default_rng(0)
    old, drift = rng.normal(-1, 0.5, (4, 60)), rng.normal(0, 0.4, (4, 60))
    ids = np.repeat(np.arange(1, 7), 10)
    advantages = np.where(ids == 3, 0.0, np.repeat(rng.normal(0, 2, (4, 6)), 10, axis=1))
    values = [jnp.asarray(x, jnp.float32) for x in (old + drift, old, advantages, np.full((4, 60), 0.1))]
    whole = Tokens(*values, sequence_ids=jnp.asarray(np.tile(ids, (4, 1))))
    without = whole._replace(weights=jnp.where(whole.sequence_ids == 3, 0.0, whole.weights))
    many = {"clip_cov": {"cov_fraction": 0.2, "cov_low": 0.0, "cov_high": 1e6}, "kl_cov": {"cov_fraction": 0.2}}
    loss = partial(LOSSES[name], **many.get(name, {}))
    found, expected = gradient(loss, whole), gradient(loss, without)
    value, value_without = loss(whole)[0], loss(without)[0]
    has_no_effect = np.array_equal(found, expected) and float(value) == pytest.approx(float(value_without), rel=1e-6)
    assert has_no_effect == (name in ZERO_GRADIENT_AT_ZERO_ADVANTAGE)


@pytest.mark.parametrize(
    ("length_normalization", "T"),
    [("own", [[3, 1], [2, 4]]), ("max", [[8, 8], [8, 8]]), ("token", [[2.5, 2.5], [2.5, 2.5]])],
)
def test_token_weights_give_the_objective_of_the_paper(length_normalization, T):
    lengths = np.array([[3, 1], [2, 4]])
    weights = token_weights(lengths, length_normalization, max_length=8)
    np.testing.assert_allclose(weights, 1 / (2 * 2 * np.array(T)), rtol=1e-6)
    if length_normalization == "token":
        np.testing.assert_allclose(weights, 1 / lengths.sum(), rtol=1e-6)

    # J = mean over prompts of (1/N) sum_i (1/T_i) sum_t term, computed by loops over responses of different lengths.
    rng = np.random.default_rng(1)
    logprobs, advantages = -rng.random((2, 2, 4)), rng.normal(size=(2, 2))
    J = 0.0
    for prompt in range(2):
        for i in range(2):
            total = sum(advantages[prompt, i] * logprobs[prompt, i, t] for t in range(lengths[prompt, i]))
            J += total / T[prompt][i] / 2 / 2
    is_response = np.arange(4) < lengths[..., None]
    loss, _ = policy_gradient_loss(
        Tokens(
            jnp.asarray(logprobs, jnp.float32),
            jnp.zeros((2, 2, 4)),
            jnp.asarray(np.broadcast_to(advantages[..., None], (2, 2, 4)), jnp.float32),
            jnp.where(is_response, weights[..., None], 0),
            jnp.ones((2, 2, 4), int),
        )
    )
    np.testing.assert_allclose(loss, -J, rtol=1e-5)


def test_unknown_length_normalization_is_rejected():
    with pytest.raises(ValueError, match='length_normalization is "mean"'):
        token_weights(np.ones((1, 2), int), "mean", 8)


@ALL_LOSSES
def test_mismatched_shapes_are_rejected(monkeypatch, loss):
    monkeypatch.setattr(
        jaxtyping.config, "jaxtyping_disable", True
    )  # as outside the tests, where jaxtyping does not check shapes
    with pytest.raises(ValueError, match=r"logprobs \(7,\), .*, advantages \(1,\), "):
        loss(tokens()._replace(advantages=jnp.ones(1)))


def test_sequence_means_are_over_trained_tokens():
    """Sequence ids are local to a row. Tokens that are not trained on do not count, and their mean is 0."""
    values = jnp.array([[1.0, 2.0, 6.0, 10.0, 9.0], [4.0, 8.0, 1.0, 1.0, 5.0]])
    ids = jnp.array([[1, 1, 1, 2, 0], [1, 2, 2, 2, 2]])
    weights = jnp.array([[0.0, 0.5, 0.5, 0.5, 0.0], [0.5, 0.5, 0.0, 0.5, 0.5]])
    zeros = jnp.zeros((2, 5))
    means = sequence_means(values, Tokens(zeros, zeros, zeros, weights, ids))
    third = 14 / 3
    np.testing.assert_allclose(means, [[0, 4, 4, 10, 0], [4, third, 0, third, third]], rtol=1e-6)


def test_the_kl_estimate_is_unbiased_and_never_negative():
    """The mean of the estimate over p is KL(p || q), for two distributions over five tokens."""
    p, q = np.array([0.1, 0.3, 0.2, 0.15, 0.25]), np.array([0.2, 0.1, 0.3, 0.35, 0.05])
    estimates = np.asarray(kl_estimate(jnp.log(q / p)))
    assert (estimates >= 0).all() and (estimates > 0).any()
    np.testing.assert_allclose((p * estimates).sum(), (p * np.log(p / q)).sum(), rtol=1e-5)
