"""Compares adapters with explicitly merged weights: computation, training, generation and export."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import ADAPTED, ADAPTED_MODEL, SCALE, SECTION, adapted_params, as_numpy, merged_by_hand
from fakes import (
    TINY,
    TINY_ALPHABET,
    TINY_MODEL,
    ByLetter,
    collect,
    optimizer_config,
    random_sequences,
    state_at,
    tiny_params,
    tiny_problems,
)
from jax.sharding import PartitionSpec
from test_layer import forward

from poly_epo_jax.config.keys import ConfigError, LoraSection
from poly_epo_jax.model import flops
from poly_epo_jax.model.hf import load_params, save_pretrained
from poly_epo_jax.model.lora import (
    ADAPTER,
    check_adapter,
    init_adapter,
    is_adapter,
    lora_fields,
    merge_adapter,
    split_adapter,
    without_adapter,
)
from poly_epo_jax.model.partition import merge_params
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh, param_shardings
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedSampler
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.set_rl import ppo_clip_loss
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.packing import pack
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.types import Sampling

NAMES = ("q", "k", "v", "o", "gate", "up", "down")
needs_eight_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def hidden_states(config, params):
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32)[None], tokens.shape)
    return forward(config, params, (tokens, positions, np.ones_like(tokens)))


def make_update(axes=(1, 1, 1), *, adapted=True, kl_coef=0.0, param_dtype="float32"):
    return cached_update(axes, adapted, kl_coef, param_dtype)


@functools.cache
def cached_update(axes, adapted, kl_coef, param_dtype):
    objective = UpdateObjective(ppo_clip_loss, entropy_coef=0.01, kl_coef=kl_coef)
    model = abstract_model(dataclasses.replace(ADAPTED if adapted else TINY, param_dtype=param_dtype))
    pattern = ADAPTER if adapted else ""
    return PolicyUpdate(model, make_mesh(*axes), objective, optimizer_config(eps=1e-3), 2, pattern)


def minibatches():
    return [pack(random_sequences(np.random.default_rng(seed), 30), 20, rows_per_microbatch=8) for seed in (0, 1)]


def start(update, params=None):
    shardings = param_shardings(ADAPTED_MODEL, update.mesh)
    return update.init(jax.device_put(params or adapted_params(), shardings))


# Computation.


@pytest.mark.slow
def test_an_adapted_model_matches_merged_weights():
    found, expected = hidden_states(ADAPTED, adapted_params()), hidden_states(TINY, tiny_params())
    assert np.abs(found - expected).max() > 0.1
    expected = hidden_states(TINY, merged_by_hand(adapted_params()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_merging_uses_float32_for_all_weight_types():
    params, expected = adapted_params(), merged_by_hand(adapted_params())
    for name in NAMES:
        found = merge_adapter(ADAPTED, params["layers"], name, 1)
        np.testing.assert_allclose(found, expected["layers"][name][1], rtol=0, atol=1e-6)
    half = {name: jnp.asarray(w, "float32" if is_adapter(name) else "bfloat16") for name, w in params["layers"].items()}
    a, b = (np.asarray(half[f"down_lora_{part}"][0]) for part in "ab")
    np.testing.assert_allclose(
        merge_adapter(ADAPTED, half, "down", 0),
        np.asarray(half["down"][0], np.float32) + SCALE * a @ b,
        rtol=0,
        atol=1e-6,
    )
    assert merge_adapter(ADAPTED, params["layers"], "q_norm", 0) is not None


@pytest.mark.slow
def test_initial_adapters_have_zero_output_and_do_not_depend_on_the_mesh():
    shardings = [param_shardings(ADAPTED_MODEL, make_mesh(*axes)) for axes in ((1, 1, 1), (1, 2, 2))]
    first, on_mesh = (as_numpy(init_adapter(ADAPTED, 5, sharding)) for sharding in shardings)
    jax.tree.map(np.testing.assert_array_equal, first, on_mesh)
    other = as_numpy(init_adapter(ADAPTED, 6, shardings[0]))
    for name in NAMES:
        a, b = (first["layers"][f"{name}_lora_{part}"] for part in "ab")
        assert not b.any() and a.dtype == b.dtype == np.float32
        assert np.abs(a - other["layers"][f"{name}_lora_a"]).max() > 0.1
        width = a[0].size // 3
        assert a.std() == pytest.approx(width**-0.5, rel=0.35)
    params = merge_params(first, tiny_params())
    np.testing.assert_array_equal(hidden_states(ADAPTED, params), hidden_states(TINY, tiny_params()))


def test_rank_0_disables_the_adapter():
    assert lora_fields(LoraSection(alpha=3.0, targets=("q_proj",))) == {}
    assert without_adapter(ADAPTED) == TINY
    assert split_adapter(TINY, tiny_params())[0] == {} == init_adapter(TINY, 0, {})
    assert flops.adapter_sizes(TINY) == {}


def test_only_targets_have_an_adapter():
    fields = lora_fields(dataclasses.replace(SECTION, targets=("o_proj", "up_proj")))
    names = {path.split(".")[1] for path in flops.adapter_sizes(dataclasses.replace(TINY, **fields))}
    assert names == {"o_lora_a", "o_lora_b", "up_lora_a", "up_lora_b"}


def test_flops_and_sizes_count_the_adapter_separately():
    adapter, base = split_adapter(ADAPTED, adapted_params())
    assert sum(flops.adapter_sizes(ADAPTED).values()) == sum(leaf.size for leaf in jax.tree.leaves(adapter))
    assert flops.total_weights(ADAPTED) == flops.total_weights(TINY)
    lengths = np.array([3]), np.array([4])
    more = flops.forward_flops(ADAPTED, *lengths) - flops.forward_flops(TINY, *lengths)
    assert more == 2 * 7 * sum(flops.adapter_sizes(ADAPTED).values())
    assert jax.tree.structure(base) == jax.tree.structure(tiny_params())


# Training.


@pytest.mark.slow
def test_gradients_match_the_chain_rule_of_merged_weights():
    """Checks dA = (alpha / rank) dW B' and dB = (alpha / rank) A' dW, with dW from an update without adapters."""
    params, (microbatches, _) = adapted_params(), minibatches()
    update, whole = make_update(), make_update(adapted=False)
    (placed, *_) = update.with_old_logprobs(start(update), [microbatches])
    found, sums = update.gradient(start(update), placed)
    merged_params = jax.tree.map(jnp.asarray, merged_by_hand(params))
    expected, expected_sums = whole.gradient(state_at(merged_params), placed)
    assert float(sums[0]["loss"]) == pytest.approx(float(expected_sums[0]["loss"]), abs=1e-5)
    assert {name for name in found["layers"]} == {f"{name}_lora_{part}" for name in NAMES for part in "ab"}
    for name in NAMES:
        d_weight = np.asarray(expected["layers"][name])
        a, b = (params["layers"][f"{name}_lora_{part}"] for part in "ab")
        layers, rank = len(a), a.shape[-1]
        a, b = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
        d_weight = d_weight.reshape(layers, a.shape[1], b.shape[2])
        d_a, d_b = (np.asarray(found["layers"][f"{name}_lora_{part}"]) for part in "ab")
        assert np.abs(d_weight).max() > 0.01
        np.testing.assert_allclose(d_a.reshape(a.shape), SCALE * d_weight @ b.swapaxes(1, 2), rtol=0, atol=2e-5)
        np.testing.assert_allclose(d_b.reshape(b.shape), SCALE * a.swapaxes(1, 2) @ d_weight, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_only_the_adapter_changes_and_has_moments():
    update = make_update()
    state = start(update)
    before = as_numpy(state.params)
    after, metrics = update(state, update.with_old_logprobs(state, minibatches()))
    jax.tree.map(np.testing.assert_array_equal, after.frozen, split_adapter(ADAPTED, before)[1])
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), as_numpy(after.trainable), split_adapter(ADAPTED, before)[0])
    assert min(jax.tree.leaves(moved)) > 1e-4 and metrics["policy/update_norm"] > 0
    arrays = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in arrays) == 2 * sum(flops.adapter_sizes(ADAPTED).values())


@pytest.mark.slow
def test_adapters_over_bfloat16_weights_train_in_float32_as_over_the_rounded_weights():
    adapter, base = split_adapter(ADAPTED, adapted_params())
    bfloat16 = jax.tree.map(lambda weight: jnp.asarray(weight, jnp.bfloat16), base)
    after = {}
    for dtype, weights in (("bfloat16", bfloat16), ("float32", jax.tree.map(jnp.float32, bfloat16))):
        update = make_update(param_dtype=dtype)
        state = start(update, merge_params(adapter, weights))
        after[dtype] = update(state, update.with_old_logprobs(state, minibatches()))[0]
        assert {leaf.dtype for leaf in jax.tree.leaves(after[dtype].frozen)} == {jnp.dtype(dtype)}
        assert {leaf.dtype for leaf in jax.tree.leaves(after[dtype].trainable)} == {jnp.dtype("float32")}
    jax.tree.map(np.testing.assert_array_equal, after["bfloat16"].frozen, bfloat16)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), as_numpy(after["bfloat16"].trainable), adapter)
    assert min(jax.tree.leaves(moved)) > 0
    jax.tree.map(
        lambda found, expected: np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6),
        *(as_numpy(after[dtype].trainable) for dtype in ("bfloat16", "float32")),
    )


@pytest.mark.slow
def test_the_reference_policy_is_the_base_policy():
    """Given only the initial adapter, the update uses the base policy in its state as the reference policy."""
    update = make_update(kl_coef=0.1)
    shardings = param_shardings(ADAPTED_MODEL, update.mesh)
    reference = init_adapter(ADAPTED, 0, shardings)
    (batch, *_), *_ = update.with_old_logprobs(start(update), minibatches(), reference)
    whole = make_update(adapted=False, kl_coef=0.1)
    base = jax.tree.map(jnp.asarray, tiny_params())
    (expected, *_), *_ = whole.with_old_logprobs(state_at(base), minibatches(), base)
    np.testing.assert_allclose(batch.reference_logprobs, expected.reference_logprobs, rtol=0, atol=1e-6)


@functools.cache
def train_step(*axes):
    update = make_update(axes)
    state = start(update)
    batches = update.with_old_logprobs(state, minibatches())
    gradient, _ = update.gradient(state, batches[0])
    return gradient, *update(state, batches)


@pytest.mark.slow
@needs_eight_devices
def test_training_does_not_depend_on_the_mesh():
    found, expected = train_step(2, 2, 2), train_step(1, 1, 1)
    for tree, alone in ((found[0], expected[0]), (found[1].params, expected[1].params)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), tree, alone)
    assert found[2] == pytest.approx(expected[2], rel=1e-4, abs=1e-5)


@needs_eight_devices
def test_adapter_matrices_are_sharded_like_their_side_of_the_weight():
    trainable = make_update((2, 2, 2)).shardings.trainable["layers"]
    specs = {name: sharding.spec for name, sharding in trainable.items()}
    assert specs["q_lora_a"] == PartitionSpec(None, "fsdp", None)
    assert specs["q_lora_b"] == PartitionSpec(None, None, "tensor", None)
    assert specs["o_lora_a"] == PartitionSpec(None, "tensor", None, None)
    assert specs["down_lora_b"] == PartitionSpec(None, None, "fsdp")


# Generation and export.


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(1, 1, 1), pytest.param((2, 2, 2), marks=needs_eight_devices)], ids=str)
def test_the_sampler_uses_merged_weights(axes):
    mesh = make_mesh(*axes)

    def generate(model, params):
        tokenizer = build_character_tokenizer(TINY_ALPHABET)
        sampler = EmbeddedSampler(model, mesh, (1, 14), max_prompt_tokens=8, max_concurrent=8)
        asyncio.run(sampler.push_weights(params, 0))
        rollouts = Rollouts(sampler, tokenizer, ByLetter(), 8)
        groups = collect(rollouts, tiny_problems(3, 8), 2, Sampling(max_tokens=8, temperature=0.0))
        return [[y.token_ids.tolist() for y in group.generations] for group in groups]

    params = jax.device_put(adapted_params(), param_shardings(ADAPTED_MODEL, mesh))
    plain = jax.device_put(merged_by_hand(adapted_params()), param_shardings(TINY_MODEL, mesh))
    assert generate(ADAPTED_MODEL, params) == generate(TINY_MODEL, plain)


def test_exported_models_have_merged_weights(tmp_path):
    save_pretrained(tmp_path / "model", adapted_params(), ADAPTED, dtype="float32")
    loaded = load_params(tmp_path / "model", ADAPTED)
    assert jax.tree.structure(loaded) == jax.tree.structure(tiny_params())
    expected = merged_by_hand(adapted_params())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), loaded, expected)
    found = hidden_states(TINY, loaded)
    np.testing.assert_allclose(found, hidden_states(ADAPTED, adapted_params()), rtol=0, atol=2e-5)


def test_experts_have_no_adapters():
    mixture = dataclasses.replace(ADAPTED, num_experts=4, experts_per_token=2)
    check_adapter(dataclasses.replace(mixture, lora_targets=("q", "o")))
    with pytest.raises(ConfigError, match=r"lora.targets contains gate_proj"):
        check_adapter(dataclasses.replace(mixture, lora_targets=("q", "gate")))
    check_adapter(dataclasses.replace(ADAPTED, lora_targets=("gate",)))
