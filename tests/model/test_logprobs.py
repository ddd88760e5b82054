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
    """48 tokens: hidden, head, targets, and a cotangent for each of the two outputs."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((rows, length, width), np.float32)
    head = rng.standard_normal((vocab, width), np.float32)
    targets = rng.integers(0, vocab, (rows, length), np.int32)
    cotangents = rng.standard_normal((2, rows, length), np.float32)
    return tuple(jnp.asarray(x) for x in (hidden, head, targets, cotangents))


def naive_logprobs(hidden, head, targets, temperature=1.0):
    log_p = jax.nn.log_softmax(hidden @ head.T / temperature, axis=-1)
    chosen = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def of_all(hidden, head, targets, **options):
    """`token_logprobs` of every token."""
    return token_logprobs(hidden, head, targets, jnp.ones(targets.shape, bool), **options)


def values_and_gradients(function, hidden, head, targets, cotangents):
    def value(hidden, head):
        logprobs, entropy = function(hidden, head, targets)
        return jnp.sum(cotangents[0] * logprobs + cotangents[1] * entropy), (logprobs, entropy)

    (_, outputs), gradients = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(hidden, head)
    return [*outputs, *gradients]


@pytest.mark.parametrize(("chunk_tokens", "temperature"), [(1, 1.0), (16, 0.7), (17, 1.3), (48, 1.0), (1000, 0.7)])
def test_values_and_gradients_match_the_naive_form(chunk_tokens, temperature):
    inputs = random_inputs()
    found = values_and_gradients(lambda *x: of_all(*x, temperature=temperature, chunk_tokens=chunk_tokens), *inputs)
    expected = values_and_gradients(lambda *x: naive_logprobs(*x, temperature=temperature), *inputs)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9])
@pytest.mark.parametrize("chunk_tokens", [7, 48])
def test_only_the_wanted_tokens_are_computed(share, chunk_tokens):
    """Values and gradients are those of the naive form, masked; the other tokens may even be no numbers."""
    hidden, head, targets, cotangents = random_inputs()
    wanted = jnp.asarray(np.random.default_rng(1).random(targets.shape) < share)

    def masked(hidden, head, targets):
        return [jnp.where(wanted, x, 0.0) for x in naive_logprobs(hidden, head, targets)]

    expected = values_and_gradients(masked, hidden, head, targets, cotangents)
    hidden = jnp.where(wanted[..., None], hidden, jnp.nan)
    found = values_and_gradients(
        lambda hidden, head, targets: token_logprobs(hidden, head, targets, wanted, chunk_tokens=chunk_tokens),
        hidden,
        head,
        targets,
        cotangents,
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


def test_values_match_float64():
    hidden, head, targets, _ = random_inputs()
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / 0.7
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = [[np.log(p[b, t, targets[b, t]]) for t in range(24)] for b in range(2)]
    logprobs, entropy = of_all(hidden, head, targets, temperature=0.7)
    np.testing.assert_allclose(logprobs, chosen, atol=1e-5, rtol=0)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), atol=1e-5, rtol=0)


def test_equal_logits_are_uniform():
    _, head, targets, _ = random_inputs(vocab=50)
    logprobs, entropy = of_all(jnp.zeros((2, 24, 16)), head, targets)
    np.testing.assert_allclose(logprobs, -np.log(50), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(50), rtol=1e-6)


def test_huge_logits_stay_finite():
    hidden, head, targets, cotangents = random_inputs()
    for x in values_and_gradients(of_all, 1e4 * hidden, head, targets, cotangents):
        assert np.isfinite(x).all()


@pytest.mark.slow
def test_bfloat16_head_gradient_is_summed_in_float32():
    """Its error is one rounding's, whatever the number of chunks; summing chunks in bfloat16 is far off."""
    hidden, head, targets, cotangents = random_inputs(rows=8, length=512, vocab=64)
    half = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    exact = half[0].astype(jnp.float32), half[1].astype(jnp.float32)
    expected = values_and_gradients(naive_logprobs, *exact, targets, cotangents)[3]

    def summed_in_bfloat16(hidden, head, targets):
        chunks = [x.reshape(-1, 1, 16, *x.shape[2:]) for x in (hidden, targets)]
        one_chunk = jax.checkpoint(lambda chunk: of_all(chunk[0], head, chunk[1]))
        return [x.reshape(targets.shape) for x in jax.lax.map(one_chunk, tuple(chunks))]

    def relative_error(function):
        found = values_and_gradients(function, *half, targets, cotangents)[3]
        assert found.dtype == jnp.bfloat16
        return np.linalg.norm(found.astype(jnp.float32) - expected) / np.linalg.norm(expected)

    error = relative_error(lambda *x: of_all(*x, chunk_tokens=16))
    assert error < 3e-3  # bfloat16 rounds to 2^-9 = 2e-3
    assert relative_error(summed_in_bfloat16) > 3 * error


def test_the_gradient_never_holds_tokens_times_vocabulary():
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

    assert temporary_bytes(naive_logprobs) >= all_logits
    assert temporary_bytes(lambda *x: of_all(*x, chunk_tokens=64)) < all_logits / 4


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("axes", [(2, 2, 2), (1, 8, 1), (1, 1, 8)])
def test_under_a_mesh_nothing_changes(axes):
    inputs = random_inputs(rows=8, width=16, vocab=64)
    expected = values_and_gradients(of_all, *inputs)
    with jax.set_mesh(make_mesh(*axes)):
        found = values_and_gradients(lambda *x: of_all(*x, chunk_tokens=5), *inputs)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [1000, 49_152, 151_936])
@pytest.mark.parametrize("device", ["h200", "v5p", "v6e"])
def test_chunks_are_as_large_as_their_share_of_the_memory_allows(device, vocab_size):
    tokens, memory = chunk_size(device, vocab_size), DEVICES[device].memory_bytes
    assert memory is not None
    allowed = LOGITS_SHARE * memory * DEVICES[device].jax_share
    assert tokens.bit_count() == 1
    assert 4 * tokens * vocab_size <= allowed < 4 * 2 * tokens * vocab_size


def test_the_chunks_of_the_policy_of_the_paper():
    assert [chunk_size(device, 151_936) for device in ("cpu", "h200", "v5p", "v6e", "gpu", "")] == [
        128,
        2048,
        2048,
        1024,
        1024,
        1024,
    ]


def test_the_backward_loop_scatters_no_logits():
    """What is subtracted at the targets is compared with the vocabulary's indices, not scattered."""
    inputs = random_inputs(width=16, vocab=64)
    program = str(jax.make_jaxpr(functools.partial(values_and_gradients, of_all))(*inputs))
    scattered = {shape.split(",")[-1] for shape in re.findall(r":\w+\[([\d,]+)\] = scatter", program)}
    assert "16" in scattered  # the hidden states' gradient
    assert "64" not in scattered
