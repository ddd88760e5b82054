import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.model.logprobs import LOGITS_SHARE, chunk_size, token_logprobs
from poly_epo_jax.parallel.devices import DEVICES
from poly_epo_jax.parallel.sharding import make_mesh


def random_inputs(rows=2, length=24, width=16, vocab=50, seed=0):
    """Draws hidden states, head, targets, and a cotangent for each of the two outputs, for 48 tokens by default."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((rows, length, width), np.float32)
    head = rng.standard_normal((vocab, width), np.float32)
    targets = rng.integers(0, vocab, (rows, length), np.int32)
    cotangents = rng.standard_normal((2, rows, length), np.float32)
    return tuple(jnp.asarray(x) for x in (hidden, head, targets, cotangents))


def reference_logprobs(hidden, head, targets, temperature=1.0):
    log_p = jax.nn.log_softmax(hidden @ head.T / temperature, axis=-1)
    chosen = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def all_logprobs(hidden, head, targets, **options):
    """Computes `token_logprobs` with all tokens selected."""
    return token_logprobs(hidden, head, targets, jnp.ones(targets.shape, bool), **options)


compiled_logprobs = jax.jit(all_logprobs, static_argnames="temperature")


def values_and_gradients(function, hidden, head, targets, cotangents):
    def value(hidden, head):
        logprobs, entropy = function(hidden, head, targets)
        return jnp.sum(cotangents[0] * logprobs + cotangents[1] * entropy), (logprobs, entropy)

    (_, outputs), gradients = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(hidden, head)
    return [*outputs, *gradients]


@pytest.mark.parametrize(("chunk_tokens", "temperature"), [(1, 1.0), (7, 1.3), (16, 0.7), (48, 1.0), (1000, 0.7)])
def test_values_and_gradients_of_selected_tokens_match_the_reference(chunk_tokens, temperature):
    """The hidden states of other tokens are NaN, which would change all results that read them."""
    hidden, head, targets, cotangents = random_inputs()

    @jax.jit
    def selected(hidden, wanted):
        def logprobs(hidden, head, targets):
            return token_logprobs(hidden, head, targets, wanted, temperature=temperature, chunk_tokens=chunk_tokens)

        return values_and_gradients(logprobs, hidden, head, targets, cotangents)

    for fraction in (0.0, 0.02, 0.3, 0.9, 1.0):
        wanted = np.random.default_rng(1).random(targets.shape) < fraction
        expected = masked_reference(hidden, head, targets, cotangents, wanted, temperature)
        found = selected(np.where(wanted[..., None], hidden, np.float32(np.nan)), wanted)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


@jax.jit
def masked_reference(hidden, head, targets, cotangents, wanted, temperature):
    def masked(*inputs):
        return [jnp.where(wanted, x, 0.0) for x in reference_logprobs(*inputs, temperature=temperature)]

    return values_and_gradients(masked, hidden, head, targets, cotangents)


def test_values_match_float64():
    hidden, head, targets, _ = random_inputs()
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / 0.7
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = [[np.log(p[b, t, targets[b, t]]) for t in range(24)] for b in range(2)]
    logprobs, entropy = compiled_logprobs(hidden, head, targets, temperature=0.7)
    np.testing.assert_allclose(logprobs, chosen, atol=1e-5, rtol=0)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), atol=1e-5, rtol=0)


def test_equal_logits_give_a_uniform_distribution():
    _, head, targets, _ = random_inputs(vocab=50)
    logprobs, entropy = compiled_logprobs(jnp.zeros((2, 24, 16)), head, targets, temperature=0.7)
    np.testing.assert_allclose(logprobs, -np.log(50), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(50), rtol=1e-6)


def test_large_logits_give_finite_results():
    hidden, head, targets, cotangents = random_inputs()
    for x in values_and_gradients(all_logprobs, 1e4 * hidden, head, targets, cotangents):
        assert np.isfinite(x).all()


@pytest.mark.slow
def test_bfloat16_head_gradient_is_summed_in_float32():
    """The error is that of a single rounding for any number of chunks. Summing chunks in bfloat16 is less accurate."""
    hidden, head, targets, cotangents = random_inputs(rows=8, length=512, vocab=64)
    half = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    exact = half[0].astype(jnp.float32), half[1].astype(jnp.float32)
    expected = values_and_gradients(reference_logprobs, *exact, targets, cotangents)[3]

    def summed_in_bfloat16(hidden, head, targets):
        chunks = [x.reshape(-1, 1, 16, *x.shape[2:]) for x in (hidden, targets)]
        one_chunk = jax.checkpoint(lambda chunk: all_logprobs(chunk[0], head, chunk[1]))
        return [x.reshape(targets.shape) for x in jax.lax.map(one_chunk, tuple(chunks))]

    def relative_error(function):
        found = values_and_gradients(function, *half, targets, cotangents)[3]
        assert found.dtype == jnp.bfloat16
        return np.linalg.norm(found.astype(jnp.float32) - expected) / np.linalg.norm(expected)

    error = relative_error(lambda *x: all_logprobs(*x, chunk_tokens=16))
    assert error < 3e-3  # The bfloat16 rounding error is 2^-9 = 2e-3.
    assert relative_error(summed_in_bfloat16) > 3 * error


def test_the_gradient_does_not_store_all_logits():
    rows, length, width, vocab = 4, 512, 16, 4096
    inputs = random_inputs(rows, length, width, vocab)
    all_logits = rows * length * vocab * 4  # bytes

    def temporary_bytes(function):
        def value(hidden, head, targets, cotangents):
            logprobs, entropy = function(hidden, head, targets)
            return jnp.sum(cotangents[0] * logprobs + cotangents[1] * entropy)

        memory = jax.jit(jax.grad(value, argnums=(0, 1))).lower(*inputs).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary_bytes(reference_logprobs) >= all_logits
    assert temporary_bytes(lambda *x: all_logprobs(*x, chunk_tokens=64)) < all_logits / 4


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("axes", [(2, 2, 2), (1, 1, 8)])
def test_results_do_not_depend_on_the_mesh(axes):
    inputs = random_inputs(rows=8, width=16, vocab=64)
    expected = values_and_gradients(all_logprobs, *inputs)
    with jax.set_mesh(make_mesh(*axes)):
        found = values_and_gradients(lambda *x: all_logprobs(*x, chunk_tokens=5), *inputs)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [1000, 49_152, 151_936])
@pytest.mark.parametrize("device", ["h200", "v5p", "v6e"])
def test_chunks_are_the_largest_that_fit_in_their_memory_fraction(device, vocab_size):
    tokens, memory = chunk_size(device, vocab_size), DEVICES[device].memory_bytes
    assert memory is not None
    allowed = LOGITS_SHARE * memory * DEVICES[device].jax_share
    assert tokens.bit_count() == 1
    assert 4 * tokens * vocab_size <= allowed < 4 * 2 * tokens * vocab_size


def test_chunk_sizes_of_qwen3():
    assert [chunk_size(device, 151_936) for device in ("cpu", "h200", "v5p", "v6e", "gpu", "")] == [
        128,
        2048,
        2048,
        1024,
        1024,
        1024,
    ]


def test_the_backward_pass_does_not_scatter_logits():
    """The term at the targets is selected by comparison with the vocabulary indices, not by a scatter."""
    inputs = random_inputs(width=16, vocab=64)
    program = str(jax.make_jaxpr(functools.partial(values_and_gradients, all_logprobs))(*inputs))
    scattered = {shape.split(",")[-1] for shape in re.findall(r":\w+\[([\d,]+)\] = scatter", program)}
    assert "16" in scattered  # Gradient of the hidden states.
    assert "64" not in scattered
