"""Tests that training and sampling on meshes of eight devices match a single device."""

import asyncio
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import (
    TINY_ALPHABET,
    TINY_MODEL,
    ByLetter,
    collect,
    on_mesh,
    optimizer_config,
    random_sequences,
    state_at,
    tiny_params,
    tiny_problems,
)
from jax.sharding import NamedSharding, PartitionSpec
from programs import COLLECTIVES, loop_bodies

from poly_epo_jax.model.logprobs import token_logprobs
from poly_epo_jax.parallel.sharding import ROWS, make_mesh
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedSampler
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.set_rl import ppo_clip_loss
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.packing import pack
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.types import Sampling

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

# Sharding and shard shapes of the weights of TINY on a 2 x 2 x 2 mesh. fsdp shards the embedding axis, tensor the
# others.
SHARDS = {
    "embed": (PartitionSpec("tensor", "fsdp"), (16, 8)),
    "norm": (PartitionSpec(None), (16,)),
    "layers.attention_norm": (PartitionSpec(None, None), (2, 16)),
    "layers.q": (PartitionSpec(None, "fsdp", "tensor", None), (2, 8, 2, 8)),
    "layers.k": (PartitionSpec(None, "fsdp", "tensor", None), (2, 8, 1, 8)),
    "layers.v": (PartitionSpec(None, "fsdp", "tensor", None), (2, 8, 1, 8)),
    "layers.o": (PartitionSpec(None, "tensor", None, "fsdp"), (2, 2, 8, 8)),
    "layers.q_norm": (PartitionSpec(None, None), (2, 8)),
    "layers.k_norm": (PartitionSpec(None, None), (2, 8)),
    "layers.mlp_norm": (PartitionSpec(None, None), (2, 16)),
    "layers.gate": (PartitionSpec(None, "fsdp", "tensor"), (2, 8, 12)),
    "layers.up": (PartitionSpec(None, "fsdp", "tensor"), (2, 8, 12)),
    "layers.down": (PartitionSpec(None, "tensor", "fsdp"), (2, 12, 8)),
}


@functools.cache
def train_step(*axes):
    """Returns gradient, metric sums of the gradient, state after two updates, and metrics of the step on a mesh."""
    mesh = make_mesh(*axes)
    # With eps close to the size of the gradient, Adam does not amplify rounding errors of small gradients.
    config = optimizer_config(eps=1e-3, weight_decay=0.1)
    update = PolicyUpdate(
        TINY_MODEL, mesh, UpdateObjective(ppo_clip_loss, kl_coef=0.1, entropy_coef=0.01), config, total_updates=2
    )
    params, reference = on_mesh(tiny_params(), mesh), on_mesh(tiny_params(1), mesh)
    minibatches = [
        pack(random_sequences(np.random.default_rng(seed), 30), 20, rows_per_microbatch=8) for seed in (0, 1)
    ]
    assert all(len(minibatch) > 1 for minibatch in minibatches)
    minibatches = update.with_old_logprobs(state_at(params), minibatches, reference)
    gradient, sums = update.gradient(state_at(params), minibatches[0])
    return gradient, sums, *update(update.init(params), minibatches)


def assert_trees_close(found, expected, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), found, expected)


SLOW = pytest.param((1, 8, 1), marks=pytest.mark.slow)
ON_MESHES = pytest.mark.parametrize("axes", [(2, 2, 2), SLOW], ids="{0[0]}x{0[1]}x{0[2]}".format)


@ON_MESHES
def test_gradients_match_one_device(axes):
    gradient, sums, *_ = train_step(*axes)
    expected, expected_sums, *_ = train_step(1, 1, 1)
    assert all(np.abs(leaf).max() > 0.05 for leaf in jax.tree.leaves(expected))
    assert_trees_close(gradient, expected)
    for metrics, expected_metrics in zip(sums, expected_sums, strict=True):
        assert_trees_close(metrics["loss"], expected_metrics["loss"])


@ON_MESHES
def test_a_training_step_matches_one_device(axes):
    _, _, state, metrics = train_step(*axes)
    _, _, expected, expected_metrics = train_step(1, 1, 1)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), expected.params, tiny_params())
    assert min(jax.tree.leaves(moved)) > 5e-3
    assert_trees_close(state.params, expected.params)
    assert int(state.updates) == 2
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)


def test_weights_gradients_and_moments_are_sharded():
    gradient, _, state, _ = train_step(2, 2, 2)
    moments = next(part for part in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(part))
    for tree in (state.params, gradient, moments.mu, moments.nu):
        found = {
            jax.tree_util.keystr(path, simple=True, separator="."): (
                leaf.sharding.spec,
                *{shard.data.shape for shard in leaf.addressable_shards},
            )
            for path, leaf in jax.tree.leaves_with_path(tree)
        }
        assert found == SHARDS


def is_adam(part):
    return hasattr(part, "mu")


def collectives_in_loops(compiled):
    """Returns the number of loops of a compiled program, and the kinds of collectives that run inside them."""
    bodies = loop_bodies(compiled.as_text())
    return len(bodies), {kind for body in bodies for kind in COLLECTIVES.findall(body)}


def compiled_gradient(logprobs):
    mesh = make_mesh(2, 2, 2)

    def abstract(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    hidden, head = abstract((8, 32, 16), jnp.float32, ROWS), abstract((32, 16), jnp.float32, "tensor", "fsdp")
    targets = abstract((8, 32), jnp.int32, ROWS)
    with jax.set_mesh(mesh):
        gradient = jax.grad(lambda *inputs: sum(output.sum() for output in logprobs(*inputs)), argnums=(0, 1))
        return jax.jit(gradient, out_shardings=(hidden.sharding, head.sharding)).lower(hidden, head, targets).compile()


def test_no_collective_runs_inside_the_vocabulary_loop():
    def all_logprobs(hidden, head, targets):
        return token_logprobs(hidden, head, targets, jnp.ones(targets.shape, bool), chunk_tokens=8)

    loops, kinds = collectives_in_loops(compiled_gradient(all_logprobs))
    assert loops >= 2  # Forward and backward pass.
    assert kinds == set()


def test_collectives_inside_loops_are_detected():
    """Without explicit sharding, the same loop contains collectives, so the test above can fail."""

    def without_shard_map(hidden, head, targets):
        def one_chunk(chunk):
            log_p = jax.nn.log_softmax(chunk[0] @ head.T)
            logprobs = jnp.take_along_axis(log_p, chunk[1][..., None], axis=-1)[..., 0]
            return logprobs, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

        chunks = hidden.reshape(8, 4, 8, 16).swapaxes(0, 1), targets.reshape(8, 4, 8).swapaxes(0, 1)
        return jax.lax.map(one_chunk, chunks)

    loops, kinds = collectives_in_loops(compiled_gradient(without_shard_map))
    assert loops >= 2
    assert "all-reduce" in kinds


@pytest.mark.slow
def test_weights_are_gathered_instead_of_activations():
    """With four rows of 52 tokens, one on each fsdp shard, no array has all 208 tokens."""
    update = PolicyUpdate(
        TINY_MODEL, make_mesh(1, 4, 2), UpdateObjective(ppo_clip_loss), optimizer_config(), total_updates=1
    )
    text = update.lower(4, 52)["gradient"].compile().as_text() or ""
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)}
    assert any(52 in shape for shape in shapes)
    assert [shape for shape in shapes if 208 in shape] == []


@pytest.mark.slow
def test_greedy_generations_of_few_problems_match_one_device():
    """test_embedded.py compares more generations than slots."""

    def generate(mesh):
        tokenizer = build_character_tokenizer(TINY_ALPHABET)
        params = on_mesh(tiny_params(), mesh)
        sampler = EmbeddedSampler(TINY_MODEL, mesh, (1, 14), max_prompt_tokens=8, max_concurrent=8)
        asyncio.run(sampler.push_weights(params, 0))
        groups = collect(
            Rollouts(sampler, tokenizer, ByLetter(), 8),
            tiny_problems(2, 8),
            2,
            Sampling(max_tokens=10, temperature=0.0),
        )
        return [[y.token_ids.tolist() for y in group.generations] for group in groups]

    expected = generate(make_mesh(1, 1, 1))
    assert len(expected) == 2
    assert generate(make_mesh(2, 2, 2)) == expected


def test_one_axis_may_take_the_remaining_devices():
    assert dict(make_mesh(2, -1, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2, "expert": 1}
    assert dict(make_mesh(1, 3, 1).shape) == {"data": 1, "fsdp": 3, "tensor": 1, "expert": 1}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            (-1, -1, 1),
            "mesh.data=-1, mesh.fsdp=-1, mesh.tensor=1, mesh.expert=1: every axis must .*, and at most one may be -1",
        ),
        ((2, 0, 1), "mesh.fsdp=0, mesh.tensor=1, .* positive size"),
        ((2, -2, 1), "mesh.fsdp=-2, mesh.tensor=1, .* positive size"),
        ((3, -1, 1), "takes a multiple of 3 devices, but there are 8; the nearest mesh .* is data=2, fsdp=4, tensor=1"),
        (
            (4, 4, 1),
            "mesh.data=4, mesh.fsdp=4, mesh.tensor=1, mesh.expert=1 takes 16 devices, .* is data=2, fsdp=4, tensor=1",
        ),
    ],
)
def test_invalid_meshes_are_rejected(axes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(*axes)


def test_another_kind_or_number_of_devices_is_rejected():
    with pytest.raises(ValueError, match=r"mesh\.device_kind=h200, but .* cpu"):
        make_mesh(1, -1, 1, device_kind="h200")
    with pytest.raises(ValueError, match=r"mesh\.num_devices=16, but only 8 are available"):
        make_mesh(1, -1, 1, num_devices=16)
    assert dict(make_mesh(1, -1, 1, device_kind="cpu", num_devices=4).shape)["fsdp"] == 4


def test_several_processes_must_use_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="uses 4 of 8 devices, but 2 processes"):
        make_mesh(1, 4, 1)
    assert make_mesh(1, -1, 1).size == 8


class Chip:
    """A TPU chip with the attributes that determine its position."""

    platform, device_kind, slice_index, core_on_chip = "tpu", "TPU v6 lite", 0, 0

    def __init__(self, id: int, coords: tuple[int, int, int]):
        self.id, self.coords = id, coords


@pytest.mark.parametrize("axes", [(1, 8, 2), (1, 4, 4), (2, 2, 4), (1, -1, 1), (4, 1, 4)])
def test_tensor_shards_are_neighbors_in_the_torus(axes, monkeypatch):
    """16 chips in a 4 x 4 torus, listed in random order."""
    positions = np.random.default_rng(0).permutation([(x, y, 0) for y in range(4) for x in range(4)])
    chips = [Chip(id, tuple(position)) for id, position in enumerate(positions.tolist())]
    monkeypatch.setattr(jax, "devices", lambda: chips)
    found = make_mesh(*axes).devices
    assert {chip.id for chip in found.flat} == set(range(16))
    for group in found.reshape(-1, found.shape[-1]):
        for one, other in itertools.pairwise(group):
            steps = [min(abs(a - b), 4 - abs(a - b)) for a, b in zip(one.coords, other.coords, strict=True)]
            assert sum(steps) == 1
