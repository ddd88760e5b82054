"""Compares experts with a dense computation of all experts, and their work on several devices."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.bench.aot.estimate import Rates, estimate_cost
from poly_epo_jax.bench.aot.hlo import parse
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.experts import Routing, apply_experts, block_size, expert_load, without_experts
from poly_epo_jax.parallel.sharding import make_mesh

EXPERTS, CHOSEN, WIDTH, HIDDEN = 8, 2, 16, 24
ROWS, TOKENS = 8, 20


def operands(seed=0):
    """Returns inputs, routing and weights. No token selects expert 3, and one expert has most of the tokens."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((ROWS, TOKENS, EXPERTS)) + np.array([0, 0, 4, -99, 0, 0, 0, 0])
    experts = jnp.asarray(np.argsort(-scores)[..., :CHOSEN], jnp.int32)
    routing = Routing(experts, jnp.asarray(rng.random(experts.shape), jnp.float32))
    shapes = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    mlp = tuple(jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32) for shape in shapes)
    return jnp.asarray(rng.standard_normal((ROWS, TOKENS, WIDTH)), jnp.float32), routing, mlp


def dense(x, routing, mlp):
    gate, up, down = mlp
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
    out = jnp.einsum("btef,efd->bted", hidden, down)
    scales = jax.nn.one_hot(routing.experts, EXPERTS) * routing.scales[..., None]
    return jnp.einsum("bted,btke->btd", out, scales)


def values_and_gradients(function, x, routing, mlp):
    """Returns the outputs, and the gradients of the sum of their sines."""

    def loss(x, scales, mlp):
        y = function(x, Routing(routing.experts, scales), mlp)
        return jnp.sin(y).sum(), y

    (_, y), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, routing.scales, mlp)
    return y, gradients


compiled = jax.jit(values_and_gradients, static_argnums=0)
EXPERTS_OF_TOKENS = functools.partial(apply_experts, jax.nn.silu, True)


def on_mesh(axes):
    if axes and jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return jax.set_mesh(make_mesh(*axes)) if axes else contextlib.nullcontext()


def assert_trees_close(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-5), found, expected)


@pytest.mark.parametrize("axes", [(), (1, 1, 1, 8), (2, 2, 1, 2), (1, 2, 2, 2)])
def test_outputs_and_gradients_match_all_experts(axes):
    expected = compiled(dense, *operands())
    with on_mesh(axes):
        assert_trees_close(compiled(EXPERTS_OF_TOKENS, *operands()), expected)


@pytest.mark.parametrize("axes", [(2, 2, 1, 2), (1, 2, 2, 2)])
def test_outputs_of_replicated_weights_match_all_experts(axes):
    expected, _ = compiled(dense, *operands())
    with on_mesh(axes):
        assert_trees_close(jax.jit(functools.partial(apply_experts, jax.nn.silu, False))(*operands()), expected)


def test_load_is_relative_to_the_mean():
    config = ModelConfig(8, 8, 8, 1, 1, 1, 8, num_experts=4, experts_per_token=2)
    experts = jnp.asarray([[[0, 1], [0, 2], [0, 3], [1, 2]]])

    @jax.jit
    def load(is_padding):
        routing = without_experts(config, Routing(experts, experts), is_padding[None])
        return expert_load(config, routing.experts)

    assert load(np.array([False, False, False, True])) == 3 / (6 / 4)
    assert load(np.ones(4, bool)) == 0


@pytest.mark.parametrize("axes", [(), (1, 2, 2, 2)])
def test_padding_does_not_reach_the_experts(axes):
    """Only padding selects expert 3, whose weights are NaN."""
    x, routing, mlp = operands()
    is_padding = np.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 3 == 0
    experts = jnp.asarray(np.where(is_padding[..., None], [3, 0], routing.experts), jnp.int32)
    config = ModelConfig(8, 8, 8, 1, 1, 1, 8, num_experts=EXPERTS, experts_per_token=CHOSEN)
    masked = without_experts(config, routing._replace(experts=experts), jnp.asarray(is_padding))
    expected = np.asarray(compiled(dense, x, routing, mlp)[0]) * ~is_padding[..., None]
    broken = tuple(np.where(np.arange(EXPERTS)[:, None, None] == 3, np.nan, weight) for weight in mlp)
    with on_mesh(axes):
        results = compiled(EXPERTS_OF_TOKENS, x, masked, tuple(jnp.asarray(weight, jnp.float32) for weight in broken))
    found, (d_x, d_scales, _) = jax.tree.map(np.asarray, results)
    assert_trees_close(found, expected)
    assert not d_x[is_padding].any() and not d_scales[is_padding].any()
    assert d_x[~is_padding].all()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_each_device_computes_its_share():
    """The FLOPs of the compiled program on one device are inversely proportional to the number of devices."""
    x, routing, mlp = operands()
    places = np.arange(ROWS * TOKENS).reshape(ROWS, TOKENS, 1)
    offsets = np.arange(CHOSEN).reshape(1, 1, -1) * EXPERTS // CHOSEN
    balanced = Routing(jnp.asarray((places + offsets) % EXPERTS, jnp.int32), routing.scales)
    pairs = ROWS * TOKENS * CHOSEN
    of_each_expert = -(-pairs // EXPERTS // block_size(pairs, EXPERTS))

    def flops(expert):
        with jax.set_mesh(make_mesh(1, 1, 1, expert)):
            program = jax.jit(lambda *operands: values_and_gradients(EXPERTS_OF_TOKENS, *operands)[1])
            text = program.lower(x, balanced, mlp).compile().as_text()
        blocks = of_each_expert * EXPERTS // expert
        return estimate_cost(parse(str(text)), Rates(1.0, 1.0, 1.0, None), lambda name: 0.0, 10**9, blocks).flops

    useful = 2 * 3 * pairs * WIDTH * HIDDEN
    alone = flops(1)
    assert 4 * flops(4) == alone
    assert 3 * useful < alone < 6 * useful
