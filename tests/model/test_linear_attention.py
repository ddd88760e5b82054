"""Compares linear attention with the recurrence of its definition, in float64, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.model import linear_attention
from poly_epo_jax.model.linear_attention import CHUNK, delta_step, packed_delta_rule, unit_lower_inverse

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 6, 5, 7


def random_inputs(rows: int, length: int, decay: float = 1.0) -> list[np.ndarray]:
    """Returns queries, keys of norm 1, values, logarithms of decays, and betas."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, rows, length, KEY_HEADS, KEY_DIM))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((rows, length, HEADS, VALUE_DIM))
    return [q, k, v, -decay * rng.exponential(size=v.shape[:3]), rng.uniform(size=v.shape[:3])]


@jax.jit
def in_chunks(first: np.ndarray, *inputs: np.ndarray) -> tuple[jax.Array, jax.Array]:
    q, k, v, log_decay, beta = (jnp.asarray(x, jnp.float32) for x in inputs)
    return packed_delta_rule(q, k, v, log_decay, beta, jnp.asarray(first))


def recurrence(first, q, k, v, log_decay, beta):
    """The equations of the module, for each row and head in turn."""
    y, memory = np.zeros(v.shape), np.zeros((len(v), HEADS, KEY_DIM, VALUE_DIM))
    for row, token, head in np.ndindex(*v.shape[:3]):
        query, key = (x[row, token, head * KEY_HEADS // HEADS] for x in (q, k))
        s = memory[row, head] * np.exp(log_decay[row, token, head]) * (first[row, token] < token)
        s = s + beta[row, token, head] * np.outer(key, v[row, token, head] - s.T @ key)
        memory[row, head], y[row, token, head] = s, s.T @ query
    return y, memory


def segment_starts(*lengths: int) -> np.ndarray:
    starts = np.cumsum((0, *lengths[:-1]))
    return np.repeat(starts, lengths)


@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
def test_packed_rows_equal_the_recurrence(decay):
    """Segments are shorter and longer than a chunk, and begin within and at the beginning of one."""
    first = np.stack(
        [segment_starts(10, CHUNK - 10, 2 * CHUNK, 5, 31), segment_starts(2 * CHUNK + 3, 60, CHUNK + 37)[:228]]
    )
    inputs = random_inputs(len(first), first.shape[1], decay)
    y, memory = in_chunks(first, *inputs)
    expected, last = recurrence(first, *inputs)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(memory, last, atol=1e-5)


def compiled_gradient(function):
    return jax.jit(jax.grad(lambda *inputs: jnp.sin(function(*inputs)).sum(), argnums=range(5)))


TWO_SEGMENTS = segment_starts(CHUNK + 9, 40)[None]
INPUTS = [x.astype(np.float32) for x in random_inputs(1, TWO_SEGMENTS.shape[1])]
gradient_in_chunks = compiled_gradient(lambda *inputs: in_chunks(TWO_SEGMENTS, *inputs)[0])


def test_gradients_equal_those_of_single_tokens():
    def by_token(q, k, v, log_decay, beta):
        def step(memory, token):
            q, k, v, log_decay, beta, is_first = token
            y, memory = delta_step(q, k, v, log_decay, beta, jnp.where(is_first, 0, memory))
            return memory, y

        tokens = [x.swapaxes(0, 1) for x in (q, k, v, log_decay, beta)]
        is_first = jnp.asarray(TWO_SEGMENTS[0] == np.arange(TWO_SEGMENTS.shape[1]))
        return jax.lax.scan(step, jnp.zeros((1, HEADS, KEY_DIM, VALUE_DIM)), (*tokens, is_first))[1].swapaxes(0, 1)

    for found, expected in zip(gradient_in_chunks(*INPUTS), compiled_gradient(by_token)(*INPUTS), strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_programs_do_not_call_lapack():
    """Concurrent calls of LAPACK block the threads of the pool on which they wait, which can deadlock."""
    program = gradient_in_chunks.lower(*INPUTS).compile().as_text()
    assert program and 'custom_call_target="lapack' not in program


def test_equal_keys_do_not_lose_precision():
    """With equal keys and betas near 2/3, products of the triangular systems of a chunk would grow exponentially."""
    q, k, v, log_decay, beta = random_inputs(1, CHUNK)
    k, beta, first = np.broadcast_to(k[:, :1], k.shape), 0.2 * beta + 0.7, np.zeros((1, CHUNK), int)
    inputs = q, k, v, 0 * log_decay, beta
    np.testing.assert_allclose(in_chunks(first, *inputs)[0], recurrence(first, *inputs)[0], atol=2e-5)


def test_convolution_stays_within_segments():
    rng = np.random.default_rng(0)
    x, weight, first = rng.standard_normal((1, 9, 4)), rng.standard_normal((3, 4)), segment_starts(1, 5, 3)[None]
    expected = np.zeros(x.shape)
    for token in range(9):
        for distance in range(min(3, token - first[0, token] + 1)):
            expected[0, token] += weight[2 - distance] * x[0, token - distance]
    found = jax.jit(linear_attention.causal_convolution)(x, weight, first)
    np.testing.assert_allclose(found, expected / (1 + np.exp(-expected)), atol=1e-6)


def test_inverses_of_triangular_matrices_and_their_gradients():
    rng = np.random.default_rng(0)
    matrix, weight = rng.standard_normal((2, 3, 16, 16)) / 4, rng.standard_normal((2, 3, 16, 16))
    lower = np.tril(matrix, -1) + np.eye(16)
    inverse = jax.jit(unit_lower_inverse)(matrix.astype(np.float32))
    np.testing.assert_allclose(inverse, np.linalg.inv(lower), atol=1e-5)

    def loss(matrix):
        return jnp.sum(weight.astype(np.float32) * unit_lower_inverse(matrix))

    found = jax.jit(jax.grad(loss))(matrix.astype(np.float32))
    for _ in range(5):  # A difference quotient in a random direction.
        direction = rng.standard_normal(matrix.shape)
        sides = (np.linalg.inv(lower + step * np.tril(direction, -1)) for step in (1e-6, -1e-6))
        expected = np.sum(weight * (next(sides) - next(sides))) / 2e-6
        np.testing.assert_allclose(np.sum(found * direction), expected, rtol=1e-4)
