"""Compares the update with a naive implementation: one sequence per row, all logits at once, explicit AdamW."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, TINY_MODEL, on_mesh, optimizer_config, random_sequences, state_at, tiny_params
from flax import nnx

from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.set_rl import cispo_loss, ppo_clip_loss
from poly_epo_jax.step.objective import UPDATE_METRICS, UpdateObjective, check_finite
from poly_epo_jax.step.optimizer import SCHEDULES, make_schedule
from poly_epo_jax.step.packing import ZeroAdvantageBatch, pack
from poly_epo_jax.step.update import PolicyUpdate

LONGEST = 18
SEQUENCES = random_sequences(np.random.default_rng(0), 24)
LATER_SEQUENCES = random_sequences(np.random.default_rng(1), 16)
REGULARIZED = {"kl_coef": 0.3, "entropy_coef": 0.1, "temperature": 0.7}
MESH = make_mesh(1, 1, 1)


def perturbed(params, distance, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + distance * rng.standard_normal(x.shape).astype(np.float32), params)


NOW = on_mesh(tiny_params(), MESH)
BEFORE = on_mesh(perturbed(tiny_params(), 0.015, seed=1), MESH)
REFERENCE = on_mesh(perturbed(tiny_params(), 0.02, seed=2), MESH)


@functools.cache
def make_update(loss=ppo_clip_loss, trainable="", **objective):
    return PolicyUpdate(
        TINY_MODEL,
        MESH,
        UpdateObjective(functools.partial(loss, clip_low=0.2, clip_high=0.28), **objective),
        # Only some gradients are clipped. Because eps is close to their size, clipping changes the result of Adam.
        optimizer_config(
            learning_rate=0.02,
            schedule="linear",
            warmup_updates=1,
            b1=0.8,
            b2=0.9,
            eps=0.03,
            weight_decay=0.1,
            max_grad_norm=0.5,
        ),
        total_updates=5,
        trainable=trainable,
    )


def start(update):
    """Returns a state with the weights NOW, which may be donated."""
    return update.init(tiny_params())


def off_policy(update, microbatches):
    """Prepares microbatches as the second minibatch of a step whose old policy is BEFORE."""
    return update.with_old_logprobs(state_at(BEFORE), [[], microbatches], REFERENCE)[1]


class Alone(NamedTuple):
    """One sequence per row, arrays [sequences, LONGEST]. Entry t describes the prediction of token t + 1."""

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


def naive_logprobs(params, tokens, temperature=1.0):
    """Computes the log-probability of every next token, and the entropy."""
    model = nnx.merge(nnx.split(TINY_MODEL)[0], params)
    positions = jnp.broadcast_to(jnp.arange(LONGEST)[None], tokens.shape)
    logits = model(jnp.asarray(tokens), positions, jnp.ones_like(tokens)) @ model.head.T / temperature
    log_p = jax.nn.log_softmax(logits)
    next_tokens = jnp.roll(tokens, -1, axis=1)
    logprobs = jnp.take_along_axis(log_p, next_tokens[..., None], axis=-1)[..., 0]
    return logprobs, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


@functools.partial(jax.jit, static_argnames=("kl_coef", "entropy_coef", "temperature"))
def naive_tokens(params, rows, old=None, kl_coef=0.0, entropy_coef=0.0, temperature=1.0):
    """Computes the loss term of every token, and the values whose means over response tokens are the metrics."""
    logprobs, entropy = naive_logprobs(params, rows.tokens, temperature)
    old = logprobs if old is None else naive_logprobs(old, rows.tokens, temperature)[0]
    ahead = naive_logprobs(REFERENCE, rows.tokens, temperature)[0] - logprobs
    advantages = rows.advantages
    ratio, kl = jnp.exp(logprobs - old), jnp.exp(ahead) - 1 - ahead
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.28) * advantages)
    outside = jnp.where(advantages > 0, ratio > 1.28, ratio < 0.8)
    return {
        "loss": rows.weights * (kl_coef * kl - surrogate - entropy_coef * entropy),
        "policy/ratio": ratio,
        "policy/clip_fraction": outside.astype(jnp.float32),
        "policy/kl": ratio - 1 - jnp.log(ratio),
        "policy/reference_kl": kl,
        "policy/entropy": entropy,
        "mismatch/mean": jnp.abs(old - rows.sampled),
        "mismatch/kl": jnp.exp(old - rows.sampled) - 1 - (old - rows.sampled),
    }


def assert_trees_close(found, expected, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), found, expected)


def of_response(values, rows):
    return {name: np.asarray(value)[rows.is_response] for name, value in values.items()}


@pytest.mark.parametrize("options", [{}, REGULARIZED], ids=["plain", "regularized"])
def test_the_gradient_equals_that_of_separate_sequences(options):
    update, rows = make_update(**options), alone(SEQUENCES)
    minibatch = off_policy(update, pack(SEQUENCES, 40, rows_per_microbatch=2))
    assert len(minibatch) > 2
    found, sums = update.gradient(state_at(NOW), minibatch)

    def loss(params):
        # Old log-probabilities come from BEFORE and are constants, through which no gradient flows.
        tokens = naive_tokens(params, rows, BEFORE, **options)
        return jnp.sum(tokens["loss"]), tokens

    (expected_loss, tokens), expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(NOW)
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(expected))
    assert_trees_close(found, expected, atol=1e-5)
    np.testing.assert_allclose(sum(float(metrics["loss"]) for metrics in sums), expected_loss, atol=1e-6)
    clipped = of_response(tokens, rows)["policy/clip_fraction"]
    assert 0.1 < clipped.mean() < 0.9
    assert sum(int(metrics["clip_fraction"]) for metrics in sums) == int(clipped.sum())


def test_the_gradient_of_the_first_minibatch_is_the_policy_gradient():
    """At ratio 1, it is the gradient of weight * advantage * log-probability. No old log-probabilities are computed."""
    update, rows = make_update(), alone(SEQUENCES)
    (minibatch,) = update.with_old_logprobs(state_at(NOW), [pack(SEQUENCES, 40, rows_per_microbatch=2)])
    assert not any(np.any(batch.old_logprobs) for batch in minibatch)
    found, _ = update.gradient(state_at(NOW), minibatch)

    def loss(params):
        return -jnp.sum(rows.weights * rows.advantages * naive_logprobs(params, rows.tokens)[0])

    assert_trees_close(found, jax.jit(jax.grad(loss))(NOW), atol=1e-5)


def test_the_ratio_of_the_first_minibatch_is_exactly_one():
    update = make_update()
    minibatches = update.with_old_logprobs(state_at(NOW), [pack(SEQUENCES, 40, rows_per_microbatch=2)])
    _, metrics = update(start(update), minibatches)
    assert (metrics["policy/ratio"], metrics["policy/clip_fraction"], metrics["policy/kl"]) == (1.0, 0.0, 0.0)


def test_results_do_not_depend_on_packing():
    update = make_update(**REGULARIZED)
    gradients, metrics = [], []
    for row_tokens, rows_per_microbatch in ((LONGEST, 24), (LONGEST, 5), (40, 2)):
        minibatch = off_policy(update, pack(SEQUENCES, row_tokens, rows_per_microbatch))
        gradients.append(update.gradient(state_at(NOW), minibatch)[0])
        metrics.append((len(minibatch), update(start(update), [minibatch])[1]))
    assert metrics[0][0] == 1 and metrics[1][0] > 2 and metrics[2][0] > 2
    tokens = sum(len(s.prompt_ids) + len(s.response_ids) for s in SEQUENCES)
    for (num_microbatches, found), shape in zip(metrics, ((24, LONGEST), (5, LONGEST), (2, 40)), strict=True):
        padding = 1 - tokens / (num_microbatches * math.prod(shape))
        assert found.pop("packing/padding_fraction") == pytest.approx(padding, abs=1e-6)
    norm = metrics[0][1]["policy/gradient_norm"]
    for gradient in gradients[1:]:
        assert_trees_close(gradient, gradients[0], atol=1e-6 * norm)
    for _, found in metrics[1:]:
        assert found == pytest.approx(metrics[0][1], rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("zero_fraction", [1.0, 0.3], ids=["all", "some"])
def test_shared_prompts_and_zero_advantage_batches_do_not_change_results(zero_fraction):
    """Weights after an update and metrics equal those of separate rows with all gradients computed."""
    rng = np.random.default_rng(7)
    sequences = [
        dataclasses.replace(s, prompt_ids=first.prompt_ids, advantage=s.advantage * (rng.random() > zero_fraction))
        for first in SEQUENCES[:4]
        for s in SEQUENCES
    ]
    plain = pack(sequences, LONGEST, rows_per_microbatch=24)
    trained = [s for s in sequences if s.advantage]
    silent = [s for s in sequences if not s.advantage]
    shared = functools.partial(pack, row_tokens=64, rows_per_microbatch=3, share_prompts=True)
    apart = [*shared(trained), *(ZeroAdvantageBatch(*batch) for batch in shared(silent))]
    assert bool(trained) == (zero_fraction < 1) and len(silent) > 20
    update, states, metrics = make_update(), [], []
    for minibatch in (plain, apart):
        minibatches = update.with_old_logprobs(state_at(NOW), [minibatch, minibatch])
        state, found = update(start(update), minibatches)
        states.append(jax.device_get(state.params))
        found.pop("packing/padding_fraction")
        metrics.append(found)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    assert_trees_close(*states, atol=1e-5)


def test_metrics_are_means_over_response_tokens():
    """A step has two minibatches. Ratios of the second are relative to the policy before the update of the first."""
    update = make_update(**REGULARIZED)
    packed = [pack(sequences, 40, rows_per_microbatch=2) for sequences in (SEQUENCES, LATER_SEQUENCES)]
    minibatches = update.with_old_logprobs(state_at(NOW), packed, REFERENCE)
    middle, _ = update(start(update), minibatches[:1])
    _, metrics = update(start(update), minibatches)

    first, second = alone(SEQUENCES), alone(LATER_SEQUENCES)
    first = of_response(naive_tokens(NOW, first, **REGULARIZED), first)
    second = of_response(naive_tokens(middle.params, second, NOW, **REGULARIZED), second)
    assert np.abs(second["policy/ratio"] - 1).max() > 0.05
    for name in first.keys() - {"loss"}:
        expected = np.concatenate([first[name], second[name]]).mean()
        assert metrics[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert metrics["policy/loss"] == pytest.approx((first["loss"].sum() + second["loss"].sum()) / 2, abs=1e-6)
    largest = max(first["mismatch/mean"].max(), second["mismatch/mean"].max())
    assert metrics["mismatch/max"] == pytest.approx(largest, rel=1e-5)


def test_the_expert_load_of_a_microbatch_is_weighted_by_its_tokens():
    """Every token passes through all experts, so the load of each microbatch is 1."""
    config = dataclasses.replace(TINY, num_experts=2, experts_per_token=2)
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    update = PolicyUpdate(model, MESH, UpdateObjective(ppo_clip_loss), optimizer_config(), total_updates=1)
    batches = [ZeroAdvantageBatch(*batch) for batch in pack(SEQUENCES, 40, rows_per_microbatch=4)]
    _, sums = update.gradient(state_at(tiny_params(model=model)), batches)
    loads, tokens = ([float(one[name]) for one in sums] for name in ("expert_load", "tokens"))
    assert len(set(tokens)) > 1 and loads == pytest.approx(tokens, rel=1e-6)


def returning(**metrics):
    """Returns a loss with given metrics."""
    return lambda tokens, **clip: (jnp.sum(tokens.weights * tokens.logprobs), metrics)


def test_the_names_of_all_metrics_of_an_update_are_reserved():
    update = make_update(returning(), importance_cap=2.0, max_mismatch_ratio=2.0, **REGULARIZED)
    programs = update.lower(num_rows=2, row_tokens=40)
    (_, sums), (_, norms) = (programs[name].out_info for name in ("gradient", "optimizer"))
    assert {*sums, *norms, "expert_load"} == UPDATE_METRICS  # the tiny model has no experts


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (returning(loss=jnp.ones(())), "returned 'loss', which is the name of another metric"),
        (returning(truncated=jnp.ones(())), "returned 'truncated'"),
        (returning(learning_rate=jnp.ones(())), "returned 'learning_rate'"),
        (returning(mine=jnp.ones(2)), "must return scalars, but mine"),
        (lambda tokens, **clip: (tokens.logprobs, {}), "must return scalars, but the loss"),
    ],
)
def test_losses_with_invalid_results_are_rejected(loss, words):
    update = make_update(loss)
    with pytest.raises(ValueError, match=f"algo.loss {words}"):
        update.lower(num_rows=2, row_tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [ppo_clip_loss, cispo_loss])
@pytest.mark.parametrize("on_policy", [True, False], ids=["on policy", "later"])
def test_mismatch_corrections_are_independent_of_clipping(loss, on_policy):
    """Differentiates the explicit formula: min(pi_old / pi_sampler, cap) is constant, and pi / pi_old is clipped."""
    cap, limit, rng = 1.5, 1.2, np.random.default_rng(5)
    update = make_update(loss=loss, importance_cap=cap, max_mismatch_ratio=limit, kl_coef=0.3, entropy_coef=0.1)
    rows = alone(SEQUENCES)
    old = np.asarray(naive_logprobs(NOW if on_policy else BEFORE, rows.tokens)[0])
    apart = rng.normal(0, 0.25, (len(old), 1)) + rng.normal(0, 0.4, old.shape)
    sampled = [
        dataclasses.replace(s, sampler_logprobs=(row + noise)[mask].astype(np.float32))
        for s, row, noise, mask in zip(SEQUENCES, old, apart, rows.is_response, strict=True)
    ]
    packed = pack(sampled, 40, rows_per_microbatch=2)
    if on_policy:
        (minibatch,) = update.with_old_logprobs(state_at(NOW), [packed], REFERENCE)
    else:
        minibatch = off_policy(update, packed)
    found, sums = update.gradient(state_at(NOW), minibatch)

    rows = alone(sampled)
    to_sampler = np.exp(old - rows.sampled)
    means = [np.exp(np.log(row[mask]).mean()) for row, mask in zip(to_sampler, rows.is_response, strict=True)]
    kept = np.array([1 / limit <= mean <= limit for mean in means])
    weights = rows.weights * np.minimum(to_sampler, cap) * kept[:, None]
    reference = naive_logprobs(REFERENCE, rows.tokens)[0]

    def objective(params):
        logprobs, entropy = naive_logprobs(params, rows.tokens)
        ratio, ahead = jnp.exp(logprobs - old), reference - logprobs
        clipped = jnp.clip(ratio, 0.8, 1.28)
        if loss is ppo_clip_loss:
            term = jnp.minimum(ratio * rows.advantages, clipped * rows.advantages)
        else:
            term = jax.lax.stop_gradient(clipped) * rows.advantages * logprobs
        return -jnp.sum(weights * (term + 0.1 * entropy - 0.3 * (jnp.exp(ahead) - 1 - ahead)))

    expected_loss, expected = jax.jit(jax.value_and_grad(objective))(NOW)
    assert_trees_close(found, expected, atol=1e-5)
    assert sum(float(metrics["loss"]) for metrics in sums) == pytest.approx(float(expected_loss), abs=1e-5)
    counts = {name: sum(int(metrics[name]) for metrics in sums) for name in ("truncated", "masked", "tokens")}
    truncated = (to_sampler > cap) & rows.is_response
    assert counts == {
        "truncated": truncated.sum(),
        "masked": (~kept).sum(),
        "tokens": rows.is_response[kept].sum(),
    }
    assert 0.05 < truncated.sum() / rows.is_response.sum() < 0.95 and 2 < kept.sum() < len(kept) - 2
    _, metrics = update(start(update), [minibatch])
    assert metrics["mismatch/truncated_fraction"] == pytest.approx(truncated.sum() / rows.is_response.sum())
    assert metrics["mismatch/masked_responses"] == (~kept).sum()
    difference = np.abs(old - rows.sampled)[rows.is_response]
    assert metrics["mismatch/mean"] == pytest.approx(difference.mean(), rel=1e-4)


def test_a_fully_masked_minibatch_has_zero_gradients_and_finite_metrics():
    update = make_update(max_mismatch_ratio=1.1)
    unlikely = [dataclasses.replace(s, sampler_logprobs=s.sampler_logprobs - 20) for s in SEQUENCES]
    minibatch = off_policy(update, pack(unlikely, 40, rows_per_microbatch=2))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(update.gradient(state_at(NOW), minibatch)[0]))
    _, metrics = update(start(update), [minibatch])
    assert metrics["mismatch/masked_responses"] == len(SEQUENCES) and metrics["policy/loss"] == 0
    check_finite(metrics, "The update")


def test_updates_are_clipped_adamw():
    """Compares three updates, of which the last is not clipped, with the formulas of AdamW in float64."""
    update = make_update()
    config = {"learning_rate": [0.01, 0.02, 0.015], "b1": 0.8, "b2": 0.9, "eps": 0.03, "decay": 0.1, "max_norm": 0.5}
    mild = [dataclasses.replace(s, weight=s.weight / 20) for s in SEQUENCES]
    packed = [pack(sequences, 40, rows_per_microbatch=2) for sequences in (SEQUENCES, LATER_SEQUENCES, mild)]
    minibatches = update.with_old_logprobs(state_at(NOW), packed)

    structure = jax.tree.structure(NOW)
    params = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(NOW)]
    m = v = [np.zeros_like(leaf) for leaf in params]
    gradient_norms, update_norms = [], []
    for t, (minibatch, rate) in enumerate(zip(minibatches, config["learning_rate"], strict=True), start=1):
        at = on_mesh(jax.tree.unflatten(structure, [leaf.astype(np.float32) for leaf in params]), MESH)
        g = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(update.gradient(state_at(at), minibatch)[0])]
        gradient_norms.append(global_norm(g))
        g = [leaf * min(1, config["max_norm"] / gradient_norms[-1]) for leaf in g]
        m = [config["b1"] * m + (1 - config["b1"]) * g for m, g in zip(m, g, strict=True)]
        v = [config["b2"] * v + (1 - config["b2"]) * g**2 for v, g in zip(v, g, strict=True)]
        m_hat, v_hat = ([x / (1 - config[b] ** t) for x in moment] for b, moment in (("b1", m), ("b2", v)))
        terms = zip(m_hat, v_hat, params, strict=True)
        steps = [-rate * (m / (np.sqrt(v) + config["eps"]) + config["decay"] * p) for m, v, p in terms]
        update_norms.append(global_norm(steps))
        params = [p + step for p, step in zip(params, steps, strict=True)]
    assert gradient_norms[0] > 1 and gradient_norms[1] > 1 and 0.02 < gradient_norms[2] < 0.4

    state, metrics = update(start(update), minibatches)
    assert int(state.updates) == 3
    assert_trees_close(state.params, jax.tree.unflatten(structure, params), atol=1e-6)
    assert metrics["policy/gradient_norm"] == pytest.approx(np.mean(gradient_norms), rel=1e-4)
    assert metrics["policy/update_norm"] == pytest.approx(np.mean(update_norms), rel=1e-4)
    assert metrics["policy/learning_rate"] == pytest.approx(np.mean(config["learning_rate"]), rel=1e-6)


def global_norm(leaves):
    return np.sqrt(sum((leaf**2).sum() for leaf in leaves))


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [8, 8, 8, 8, 8, 8, 8]),
        ("constant", 3, [2, 4, 6, 8, 8, 8, 8]),
        ("linear", 0, [8, 7, 6, 5, 4, 4, 4]),  # over 4 updates
        ("linear", 1, [4, 8, 6.66666667, 5.33333333, 4, 4, 4]),
        ("cosine", 0, [8, 7.41421356, 6, 4.58578644, 4, 4, 4]),
        ("cosine", 1, [4, 8, 7, 5, 4, 4, 4]),
        ("cosine", 9, [0.8, 1.6, 2.4, 3.2, 4, 4.8, 5.6]),  # the warm-up may be longer than the run
    ],
)
def test_learning_rates_equal_hand_computed_values(schedule, warmup, expected):
    config = optimizer_config(learning_rate=0.8, schedule=schedule, warmup_updates=warmup, end_lr_fraction=0.5)
    rates = make_schedule(config, total_updates=4)
    np.testing.assert_allclose([10 * float(rates(update)) for update in range(7)], expected, rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_starts_at_the_peak(schedule):
    assert float(make_schedule(optimizer_config(schedule=schedule), total_updates=4)(0)) == np.float32(1e-2)


def test_an_update_without_minibatches_changes_nothing():
    update = make_update()
    state = start(update)
    after, metrics = update(state, update.with_old_logprobs(state, []))
    assert metrics == {"judge/skipped_updates": 0}
    assert int(after.updates) == 0
    jax.tree.map(np.testing.assert_array_equal, after.params, NOW)


@pytest.mark.slow
def test_a_run_compiles_each_program_once():
    """Steps differ in the number of microbatches, in lengths and in being on policy, but not in shapes."""
    update = make_update(entropy_coef=0.02)
    state = start(update)
    for seed, count in ((0, 24), (1, 9), (2, 40)):
        sequences = random_sequences(np.random.default_rng(seed), count)
        packed = [pack(sequences[::2], 40, rows_per_microbatch=2), pack(sequences[1::2], 40, rows_per_microbatch=2)]
        state, _ = update(state, update.with_old_logprobs(state, packed))
    programs: Any = update._accumulate, update._logprobs, update._apply, update._zeros
    assert [program._cache_size() for program in programs] == [1, 1, 1, 1]


def test_an_update_without_prompts_only_advances_the_learning_rate():
    """The learning rate is 0 after the second update, including if the second update is skipped."""
    config = optimizer_config(learning_rate=0.02, schedule="linear", end_lr_fraction=0.0)
    update = PolicyUpdate(TINY_MODEL, MESH, UpdateObjective(ppo_clip_loss), config, total_updates=2)
    minibatch = off_policy(update, pack(SEQUENCES, 40, rows_per_microbatch=2))
    first, _ = update(start(update), [minibatch])
    before = jax.device_get(first)
    skipped, metrics = update(first, [[]])
    assert metrics == {"judge/skipped_updates": 1} and int(skipped.updates) == 2
    assert_trees_close(skipped.params, before.params, atol=0)
    assert_trees_close(moments_of(skipped), moments_of(before), atol=0)
    after, metrics = update(skipped, [minibatch])
    assert metrics["policy/learning_rate"] == 0 and metrics["policy/gradient_norm"] > 0
    assert_trees_close(after.params, before.params, atol=0)


@pytest.mark.slow
def test_moments_are_float32_except_a_configured_first_moment():
    def dtypes(**changes):
        config = optimizer_config(**changes)
        update = PolicyUpdate(TINY_MODEL, MESH, UpdateObjective(ppo_clip_loss), config, total_updates=5)
        state, _ = update.lower(num_rows=2, row_tokens=40)["optimizer"].out_info
        moments = moments_of(state)
        return [{leaf.dtype.name for leaf in jax.tree.leaves(tree)} for tree in (moments.mu, moments.nu, state.params)]

    assert dtypes() == [{"float32"}] * 3
    assert dtypes(first_moment_dtype="bfloat16") == [{"bfloat16"}, {"float32"}, {"float32"}]


def moments_of(state):
    """Returns the state of Adam from the optimizer state."""

    def is_adam(part):
        return hasattr(part, "mu")

    return next(part for part in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(part))


def test_only_trainable_weights_change():
    """Trains the attention weights. Their gradient equals that of full training, and other weights do not change."""
    pattern = r"layers\.(q|k|v|o)"
    partial, full = make_update(trainable=pattern), make_update()
    minibatch = off_policy(full, pack(SEQUENCES, 40, rows_per_microbatch=2))
    initial = partial.init(tiny_params())
    assert sorted(initial.trainable["layers"]) == ["k", "o", "q", "v"]
    assert jax.tree.structure(initial.params) == jax.tree.structure(NOW)
    gradient, _ = partial.gradient(initial, minibatch)
    expected = full.gradient(state_at(NOW), minibatch)[0]["layers"]
    assert_trees_close(gradient["layers"], {name: expected[name] for name in gradient["layers"]}, atol=1e-6)

    after, _ = partial(initial, [minibatch])
    moments = moments_of(after)
    assert jax.tree.structure(moments.mu) == jax.tree.structure(after.trainable)
    for name, leaf in after.params["layers"].items():
        assert (name in gradient["layers"]) == (not np.array_equal(leaf, NOW["layers"][name])), name
    np.testing.assert_array_equal(after.params["embed"], NOW["embed"])


def test_a_pattern_that_matches_no_weight_is_rejected():
    with pytest.raises(
        ValueError, match=r"train\.trainable_pattern='lora.*' matches no weight; choose among embed, layers\."
    ):
        make_update(trainable="lora.*")
