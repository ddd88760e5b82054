"""Tests the collectives per token of the decoding program on a mesh, which is compiled but not run."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from programs import collectives_per_pass

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import decoding_weights, gather_weights_over_fsdp
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh, param_shardings
from poly_epo_jax.rollouts.embedded import programs
from poly_epo_jax.types import Params

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

LAYERS, ROWS_OF_A_DEVICE = 3, 4
CONFIG = ModelConfig(
    vocab_size=640, hidden_size=64, mlp_size=96, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=16
)


@functools.cache
def compiled_decode(axes: tuple[int, int, int]) -> tuple[str, Params, Params]:
    """Returns the decoding program as text, and the shardings of pushed weights and of gathered weights."""
    mesh, rows = make_mesh(*axes), ROWS_OF_A_DEVICE * axes[0] * axes[1]

    def abstract(tree, shardings):
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    with jax.set_mesh(mesh):

        def result_of(program, *arguments):
            return abstract(jax.eval_shape(program, *arguments), program.lower(*arguments).compile().output_shardings)

        model = abstract_model(CONFIG)
        params = abstract(nnx.to_pure_dict(nnx.split(model)[1]), param_shardings(model, mesh))
        pushed = result_of(jax.jit(functools.partial(decoding_weights, CONFIG)), params)
        whole = result_of(jax.jit(gather_weights_over_fsdp), pushed)
        state = result_of(jax.jit(functools.partial(programs.start, CONFIG, rows, 32, 48)))
        sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 20}  # The filters contain inner loops.
        decode = programs.decode.jitted.lower(CONFIG, whole, state, jnp.zeros(2, jnp.int32), turnover=2, **sampling)
        shardings = [jax.tree.map(lambda x: x.sharding, weights) for weights in (pushed, whole)]
        return decode.compile().as_text() or "", *shardings


BY_TENSOR = {"all-reduce": 2 * LAYERS + 1, "all-gather": 1}
"""Collectives per token: all-reduces after each half of a layer and after the embedding, an all-gather of logits."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((1, 1, 1), {}),
        ((1, 8, 1), {"all-reduce": 1}),  # Termination condition of the loop.
        ((1, 1, 2), BY_TENSOR),
        ((2, 2, 2), BY_TENSOR | {"all-reduce": BY_TENSOR["all-reduce"] + 1}),
    ],
    ids=str,
)
def test_a_token_requires_only_the_collectives_of_tensor_sharding(axes, expected):
    assert collectives_per_pass(compiled_decode(axes)[0]) == Counter(expected)


def test_the_program_contains_no_all_gather_over_fsdp():
    text, _, _ = compiled_decode((1, 8, 1))
    assert "all-gather" not in text


def test_pushed_weights_are_sharded_and_gathered_weights_are_replicated_over_fsdp():
    _, pushed, whole = compiled_decode((2, 2, 2))

    def parts(shardings):
        layer = shardings["layers"][0]
        return {name: tuple(layer[name].spec) for name in ("q", "down")} | {"head": tuple(shardings["head"].spec)}

    assert parts(pushed) == {"q": ("fsdp", "tensor"), "down": ("tensor", "fsdp"), "head": ("tensor", "fsdp")}
    whole_parts = {name: tuple(axis for axis in spec if axis) for name, spec in parts(whole).items()}
    assert whole_parts == {"q": ("tensor",), "down": ("tensor",), "head": ("tensor",)}
