"""The update against a naive one: sequences alone, all logits at once, losses and AdamW written out."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY_MODEL, optimizer_config, random_sequences, tiny_params
from flax import nnx

from poly_epo_jax.batching import pack
from poly_epo_jax.model.sharding import make_mesh
from poly_epo_jax.set_rl import ppo_clip_loss
from poly_epo_jax.update import SCHEDULES, PolicyUpdate, make_schedule

LONGEST = 18
SEQUENCES = random_sequences(np.random.default_rng(0), 16)
LATER_SEQUENCES = random_sequences(np.random.default_rng(1), 16)
REGULARISED = {"kl_coef": 0.3, "entropy_coef": 0.1, "temperature": 0.7}


def moved(params, scale, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + scale * rng.standard_normal(x.shape).astype(np.float32), params)


NOW = tiny_params()
BEFORE, REFERENCE = moved(NOW, 0.02, seed=1), moved(NOW, 0.03, seed=2)


@functools.cache
def make_update(kl_coef=0.0, entropy_coef=0.0, temperature=1.0):
    return PolicyUpdate(
        TINY_MODEL,
        make_mesh(1, 1, 1),
        functools.partial(ppo_clip_loss, clip_low=0.2, clip_high=0.28),
        optimizer_config(),
        total_updates=10,
        temperature=temperature,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


def off_policy(update, microbatches):
    """The microbatches as those of a step's second minibatch, where BEFORE made the step's generations."""
    return update.with_old_logprobs(BEFORE, [[], microbatches], REFERENCE)[1]


class Alone(NamedTuple):
    """Every sequence in a row of its own, all [sequences, LONGEST]; position t concerns token t + 1."""

    tokens: Any
    is_response: Any
    weights: Any
    advantages: Any
    sampled: Any


def alone(sequences):
    fields = Alone(*(np.zeros((len(sequences), LONGEST), dtype) for dtype in (np.int32, bool, *[np.float32] * 3)))
    for row, s in enumerate(sequences):
        ids = np.concatenate([s.prompt_ids, s.response_ids])
        fields.tokens[row, : len(ids)] = ids
        for i, logprob in enumerate(s.sampler_logprobs):
            at = row, len(s.prompt_ids) + i - 1
            fields.is_response[at], fields.sampled[at] = True, logprob
            fields.weights[at], fields.advantages[at] = s.weight, s.advantage
    return fields


@functools.partial(jax.jit, static_argnames="temperature")
def naive_logprobs(params, tokens, temperature=1.0):
    """Log-probability of every next token, and entropy."""
    model = nnx.merge(nnx.split(TINY_MODEL)[0], params)
    positions = jnp.broadcast_to(jnp.arange(LONGEST)[None], tokens.shape)
    logits = model(tokens, positions, jnp.ones_like(tokens)) @ model.head.T / temperature
    log_p = jax.nn.log_softmax(logits)
    next_tokens = jnp.roll(tokens, -1, axis=1)
    logprobs = jnp.take_along_axis(log_p, next_tokens[..., None], axis=-1)[..., 0]
    return logprobs, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def naive_tokens(params, sequences, old=None, kl_coef=0.0, entropy_coef=0.0, temperature=1.0):
    """Of every response token: its terms of the loss, and what the metrics are means of."""
    rows = alone(sequences)
    here = rows.is_response
    logprobs, entropy = (x[here] for x in naive_logprobs(params, rows.tokens, temperature))
    old = logprobs if old is None else naive_logprobs(old, rows.tokens, temperature)[0][here]
    ahead = naive_logprobs(REFERENCE, rows.tokens, temperature)[0][here] - logprobs
    advantages = rows.advantages[here]
    ratio, kl = jnp.exp(logprobs - old), jnp.exp(ahead) - 1 - ahead
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.28) * advantages)
    outside = jnp.where(advantages > 0, ratio > 1.28, ratio < 0.8)
    return {
        "loss": rows.weights[here] * (kl_coef * kl - surrogate - entropy_coef * entropy),
        "policy/ratio": ratio,
        "policy/clip_fraction": outside.astype(jnp.float32),
        "policy/kl": ratio - 1 - jnp.log(ratio),
        "policy/reference_kl": kl,
        "policy/entropy": entropy,
        "mismatch": jnp.abs(logprobs - rows.sampled[here]),
    }


def assert_trees_close(found, expected, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), found, expected)


@pytest.mark.parametrize("options", [{}, REGULARISED], ids=["plain", "regularised"])
def test_the_gradient_is_that_of_sequences_alone(options):
    update = make_update(**options)
    batches = off_policy(update, pack(SEQUENCES, 40, rows_per_microbatch=2))
    assert len(batches) > 2
    found, sums = update.gradient(NOW, batches)

    def loss(params):
        # Old log-probabilities are data: they come from BEFORE, which the gradient does not see.
        return jnp.sum(naive_tokens(params, SEQUENCES, BEFORE, **options)["loss"])

    expected_loss, expected = jax.value_and_grad(loss)(NOW)
    assert all(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(expected))
    assert_trees_close(found, expected, atol=1e-5)
    np.testing.assert_allclose(sum(float(metrics["loss"]) for metrics in sums), expected_loss, atol=1e-6)
    clipped = naive_tokens(NOW, SEQUENCES, BEFORE, **options)["policy/clip_fraction"]
    assert 0.05 < clipped.mean() < 0.95
    assert sum(int(metrics["clip_fraction"]) for metrics in sums) == int(clipped.sum())


def test_the_first_minibatch_is_on_policy():
    """Its gradient is that of the surrogate at ratio one, weights * advantages * grad log-prob, without old ones."""
    update = make_update()
    (batches,) = update.with_old_logprobs(NOW, [pack(SEQUENCES, 40, rows_per_microbatch=2)])
    found, _ = update.gradient(NOW, batches)
    rows = alone(SEQUENCES)

    def loss(params):
        return -jnp.sum(rows.weights * rows.advantages * naive_logprobs(params, rows.tokens)[0])

    assert_trees_close(found, jax.grad(loss)(NOW), atol=1e-5)


@pytest.fixture(scope="module")
def whole():
    """Gradient and metrics of all sequences in one microbatch."""
    update = make_update(**REGULARISED)
    minibatch = off_policy(update, pack(SEQUENCES, LONGEST, rows_per_microbatch=16))
    assert len(minibatch) == 1
    return update.gradient(NOW, minibatch)[0], update(update.init(NOW), [minibatch])[1]


@pytest.mark.parametrize(("row_tokens", "rows_per_microbatch"), [(LONGEST, 1), (LONGEST, 3), (40, 2), (300, 1)])
def test_nothing_depends_on_how_sequences_are_packed(whole, row_tokens, rows_per_microbatch):
    update = make_update(**REGULARISED)
    minibatch = off_policy(update, pack(SEQUENCES, row_tokens, rows_per_microbatch))
    assert len(minibatch) > 1 or row_tokens == 300
    assert_trees_close(update.gradient(NOW, minibatch)[0], whole[0], atol=1e-6)
    metrics = update(update.init(NOW), [minibatch])[1]
    assert metrics.keys() == whole[1].keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, whole[1][name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_metrics_are_means_over_response_tokens():
    """Of a step with two minibatches; the second is compared with the policy from before the first's update."""
    update = make_update(**REGULARISED)
    packed = [pack(sequences, LONGEST, rows_per_microbatch=3) for sequences in (SEQUENCES, LATER_SEQUENCES)]
    minibatches = update.with_old_logprobs(NOW, packed, REFERENCE)
    assert [bool(batch.on_policy) for minibatch in minibatches for batch in minibatch].count(True) == len(packed[0])
    middle, _ = update(update.init(NOW), minibatches[:1])
    middle = jax.device_get(middle.params)
    _, metrics = update(update.init(NOW), minibatches)

    first = naive_tokens(NOW, SEQUENCES, **REGULARISED)
    second = naive_tokens(middle, LATER_SEQUENCES, NOW, **REGULARISED)
    assert np.abs(second["policy/ratio"] - 1).max() > 0.05
    for name in first.keys() - {"loss", "mismatch"}:
        expected = np.concatenate([first[name], second[name]]).mean()
        np.testing.assert_allclose(metrics[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(metrics["policy/loss"], (first["loss"].sum() + second["loss"].sum()) / 2, atol=1e-6)
    # Only the first minibatch is computed with the weights that sampled it.
    np.testing.assert_allclose(metrics["mismatch/mean"], first["mismatch"].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["mismatch/max"], first["mismatch"].max(), rtol=1e-5)


def test_the_first_minibatchs_ratio_is_exactly_one():
    update = make_update()
    minibatches = update.with_old_logprobs(NOW, [pack(SEQUENCES, 40, rows_per_microbatch=2)])
    _, metrics = update(update.init(NOW), minibatches)
    assert (metrics["policy/ratio"], metrics["policy/clip_fraction"], metrics["policy/kl"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("max_grad_norm", [0.05, 100.0])
def test_two_updates_are_clipped_adamw(max_grad_norm):
    """With eps near the gradient's size Adam does not hide the clipping's scale. Formulas of AdamW in float64."""
    learning_rate, b1, b2, eps, decay = 0.02, 0.8, 0.9, 0.03, 0.1
    config = optimizer_config(
        learning_rate=learning_rate,
        schedule="linear",
        warmup_updates=1,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=decay,
        max_grad_norm=max_grad_norm,
    )
    update = PolicyUpdate(TINY_MODEL, make_mesh(1, 1, 1), ppo_clip_loss, config, total_updates=5)
    packed = [pack(sequences, 40, rows_per_microbatch=4) for sequences in (SEQUENCES, LATER_SEQUENCES)]
    minibatches = update.with_old_logprobs(NOW, packed)

    params = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(NOW)]
    structure = jax.tree.structure(NOW)
    m = v = [np.zeros_like(leaf) for leaf in params]
    norms, update_norms, rates = [], [], [0.01, 0.02]  # one of warm-up, then the peak
    for t, (minibatch, rate) in enumerate(zip(minibatches, rates, strict=True), start=1):
        at = jax.tree.unflatten(structure, [leaf.astype(np.float32) for leaf in params])
        gradient = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(update.gradient(at, minibatch)[0])]
        norms.append(np.sqrt(sum((leaf**2).sum() for leaf in gradient)))
        gradient = [leaf * min(1, max_grad_norm / norms[-1]) for leaf in gradient]
        m = [b1 * x + (1 - b1) * g for x, g in zip(m, gradient, strict=True)]
        v = [b2 * x + (1 - b2) * g**2 for x, g in zip(v, gradient, strict=True)]
        steps = [
            -rate * ((x / (1 - b1**t)) / (np.sqrt(y / (1 - b2**t)) + eps) + decay * p)
            for x, y, p in zip(m, v, params, strict=True)
        ]
        update_norms.append(np.sqrt(sum((leaf**2).sum() for leaf in steps)))
        params = [p + s for p, s in zip(params, steps, strict=True)]
    assert 0.2 < min(norms) and max(norms) < 100

    state, metrics = update(update.init(NOW), minibatches)
    assert int(state.updates) == 2
    assert_trees_close(state.params, jax.tree.unflatten(structure, params), atol=1e-6)
    np.testing.assert_allclose(metrics["policy/gradient_norm"], np.mean(norms), rtol=1e-4)
    np.testing.assert_allclose(metrics["policy/update_norm"], np.mean(update_norms), rtol=1e-4)
    np.testing.assert_allclose(metrics["policy/learning_rate"], np.mean(rates), rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [8, 8, 8, 8, 8, 8, 8]),
        ("constant", 3, [2, 4, 6, 8, 8, 8, 8]),
        ("linear", 0, [8, 7, 6, 5, 4, 4, 4]),  # 4 updates long
        ("linear", 1, [4, 8, 6.66666667, 5.33333333, 4, 4, 4]),
        ("cosine", 0, [8, 7.41421356, 6, 4.58578644, 4, 4, 4]),
        ("cosine", 1, [4, 8, 7, 5, 4, 4, 4]),
        ("cosine", 9, [0.8, 1.6, 2.4, 3.2, 4, 4.8, 5.6]),  # the warm-up may outlast the run
    ],
)
def test_learning_rates_by_hand(schedule, warmup, expected):
    config = optimizer_config(learning_rate=8.0, schedule=schedule, warmup_updates=warmup, final_fraction=0.5)
    rates = make_schedule(config, total_updates=4)
    np.testing.assert_allclose([float(rates(update)) for update in range(7)], expected, rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_starts_at_the_peak(schedule):
    assert float(make_schedule(optimizer_config(schedule=schedule), total_updates=4)(0)) == np.float32(1e-2)


def test_without_minibatches_nothing_changes():
    update = make_update()
    state = update.init(NOW)
    after, metrics = update(state, update.with_old_logprobs(state.params, []))
    assert metrics == {}
    assert int(after.updates) == 0
    jax.tree.map(np.testing.assert_array_equal, after.params, NOW)
