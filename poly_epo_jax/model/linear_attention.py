"""Linear attention with the gated delta rule (Yang et al., 2025, "Gated Delta Networks"), as in Qwen3.5.

Queries, keys and values pass through a causal convolution over the last `conv_size` tokens. Each value head then has a
state S [key_dim, value_dim] in place of a cache of keys and values. For each token, with key k, value v, query q, decay
a and beta b (eq. 10 of the paper, transposed):

    S <- a S
    S <- S + b k (v - S' k)'
    y = S' q

`packed_delta_rule` computes packed rows in chunks of tokens: within a chunk, the updates solve a triangular system, and
only the state after each chunk is computed sequentially (section 3.3 of the paper). `delta_step` computes one token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.attention.segments import pad_to_blocks
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.parallel.sharding import ROWS, on_each_device

CHUNK = 64
"""Number of tokens per chunk of `packed_delta_rule`."""


class LinearInputs(NamedTuple):
    """Inputs of linear attention.

    Attributes:
      qkv: Queries, keys and values of all heads before the convolution, [*tokens, linear_channels].
      conv: Weight of the convolution, [conv_size, linear_channels].
      log_decay: Logarithm of the decay of each value head, at most 0, float32 [*tokens, linear_value_heads].
      beta: Factor of the update of each value head, from 0 to 1, [*tokens, linear_value_heads].
    """

    qkv: jax.Array
    conv: jax.Array
    log_decay: jax.Array
    beta: jax.Array


class LinearState(NamedTuple):
    """State of a layer with linear attention after some tokens of each sequence.

    Attributes:
      inputs: The last conv_size - 1 inputs of the convolution, [rows, linear_channels, conv_size - 1].
      memory: State of each value head, float32 [rows, linear_value_heads, linear_key_dim, linear_value_dim].
    """

    inputs: jax.Array
    memory: jax.Array


def init_linear_state(config: ModelConfig, rows: int) -> LinearState:
    """Creates the state of sequences without tokens.

    Args:
      config: Model configuration.
      rows: Number of sequences.

    Returns:
      The state.
    """
    memory = rows, config.linear_value_heads, config.linear_key_dim, config.linear_value_dim
    inputs = jnp.zeros((rows, config.linear_channels, config.conv_size - 1), config.dtype)
    return LinearState(inputs, jnp.zeros(memory, jnp.float32))


def packed_linear_attention(
    config: ModelConfig, inputs: LinearInputs, first: Int[Array, "B T"]
) -> Float[Array, "B T H D"]:
    """Computes linear attention within the segments of packed rows. Shared prompts are not supported.

    Args:
      config: Model configuration.
      inputs: Inputs of all tokens.
      first: Index in the row of the first token of each token's segment (`Segments.first`).

    Returns:
      The outputs of all value heads, in the type of `inputs.qkv`.
    """
    return _packed(config, inputs, first)[0]


def prefill_linear_attention(
    config: ModelConfig, inputs: LinearInputs, counted: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T H D"], LinearState]:
    """Computes linear attention of prompts, and the state after some of their tokens.

    Args:
      config: Model configuration.
      inputs: Inputs of all tokens.
      counted: Mask of the tokens that the state includes, which are the first tokens of each row.

    Returns:
      A tuple of the outputs, which are undefined for tokens that are not counted, and the state.
    """
    log_decay, beta = (jnp.where(counted[..., None], x, 0) for x in (inputs.log_decay, inputs.beta))
    first = jnp.zeros(counted.shape, jnp.int32)
    y, memory = _packed(config, inputs._replace(log_decay=log_decay, beta=beta), first)
    index = counted.sum(axis=1)[:, None] + jnp.arange(1 - config.conv_size, 0)[None]
    last = jnp.take_along_axis(inputs.qkv, jnp.maximum(index, 0)[..., None], axis=1)
    return y, LinearState(jnp.where(index[..., None] >= 0, last, 0).swapaxes(1, 2), memory)


def decode_linear_attention(
    config: ModelConfig, inputs: LinearInputs, state: LinearState
) -> tuple[Float[Array, "B H D"], LinearState]:
    """Computes linear attention of one new token per row.

    Args:
      config: Model configuration.
      inputs: Inputs of the new tokens.
      state: State of the rows before these tokens.

    Returns:
      A tuple of the outputs and the new state.
    """
    read = jnp.concatenate([state.inputs, inputs.qkv[..., None]], axis=2)
    mixed = jnp.einsum("bcs,sc->bc", read, inputs.conv, preferred_element_type=jnp.float32)
    q, k, v = split_heads(config, jax.nn.silu(mixed).astype(inputs.qkv.dtype))
    y, memory = delta_step(q, k, v, inputs.log_decay, inputs.beta.astype(jnp.float32), state.memory)
    return y.astype(inputs.qkv.dtype), LinearState(read[..., 1:], memory)


def causal_convolution(
    x: Float[Array, "B T C"], weight: Float[Array, "S C"], first: Int[Array, "B T"]
) -> Float[Array, "B T C"]:
    """Computes the sum of the last S tokens of a segment, each multiplied by the weights of its distance, and SiLU.

    Args:
      x: Inputs.
      weight: Weights of each channel. The last one is that of the token itself.
      first: Index in the row of the first token of each token's segment.

    Returns:
      The activated sums, in the type of x.
    """
    index, total = jnp.arange(x.shape[1])[None], jnp.zeros(x.shape, jnp.float32)
    for distance, scale in enumerate(weight[::-1, None, None]):
        shifted = jnp.pad(x, [(0, 0), (distance, 0), (0, 0)])[:, : x.shape[1]]
        total += jnp.where((index - distance >= first)[..., None], shifted, 0).astype(jnp.float32) * scale
    return jax.nn.silu(total).astype(x.dtype)


def split_heads(config: ModelConfig, qkv: Float[Array, "*M C"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits the outputs of the convolution into heads.

    Args:
      config: Model configuration.
      qkv: Outputs of the convolution.

    Returns:
      Queries of norm linear_key_dim^-1/2 and keys of norm 1, [*tokens, linear_key_heads, linear_key_dim], and values
      [*tokens, linear_value_heads, linear_value_dim], in float32.
    """
    width, x = config.linear_key_heads * config.linear_key_dim, qkv.astype(jnp.float32)
    q, k, v = jnp.split(x, [width, 2 * width], axis=-1)
    q, k = (part.reshape(*x.shape[:-1], config.linear_key_heads, config.linear_key_dim) for part in (q, k))
    q, k = (part * jax.lax.rsqrt(jnp.sum(part * part, axis=-1, keepdims=True) + 1e-6) for part in (q, k))
    v = v.reshape(*x.shape[:-1], config.linear_value_heads, config.linear_value_dim)
    return q * config.linear_key_dim**-0.5, k, v


def delta_step(
    q: Float[Array, "B K D"],
    k: Float[Array, "B K D"],
    v: Float[Array, "B H E"],
    log_decay: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    memory: Float[Array, "B H D E"],
) -> tuple[Float[Array, "B H E"], Float[Array, "B H D E"]]:
    """Applies the gated delta rule to one token per row. Consecutive value heads share a query head and a key head.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      log_decay: Logarithm of the decay.
      beta: Factor of the update.
      memory: State before the token.

    Returns:
      A tuple of the outputs and the state after the token.
    """
    q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    memory = memory * jnp.exp(log_decay)[..., None, None]
    change = beta[..., None] * (v - jnp.einsum("bhde,bhd->bhe", memory, k))
    memory = memory + k[..., None] * change[..., None, :]
    return jnp.einsum("bhde,bhd->bhe", memory, q), memory


def packed_delta_rule(
    q: Float[Array, "B T K D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T H E"],
    log_decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    first: Int[Array, "B T"],
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H D E"]]:
    """Applies the gated delta rule to packed rows. The state is zero at the beginning of each segment.

    The backward pass stores the state before each chunk and computes the chunks again.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      log_decay: Logarithm of the decay.
      beta: Factor of the update.
      first: Index in the row of the first token of each token's segment.

    Returns:
      A tuple of the outputs and the state after the last token of each row.
    """
    rows, length = first.shape
    # Padding belongs to the last segment. It has beta 0 and decay 1, so that it does not change the state.
    first = jnp.pad(first, [(0, 0), (0, -length % CHUNK)], mode="edge")
    arrays = *pad_to_blocks(CHUNK, q, k, v, log_decay, beta), first
    chunks = [x.reshape(rows, -1, CHUNK, *x.shape[2:]).swapaxes(0, 1) for x in arrays]
    start = jnp.zeros((rows, v.shape[2], k.shape[3], v.shape[3]), jnp.float32), jnp.full(rows, -1, first.dtype)
    (memory, _), y = jax.lax.scan(jax.checkpoint(_chunk), start, tuple(chunks))
    return y.swapaxes(0, 1).reshape(rows, -1, *y.shape[3:])[:, :length], memory


def _chunk(carry, scanned):
    """Computes one chunk [B, C] from the state and the segment of the last token of the previous chunk."""
    memory, previous = carry
    q, k, v, log_decay, beta, first = scanned
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2).swapaxes(1, 2) for x in (q, k))  # [B, H, C, D]
    v, beta = v.swapaxes(1, 2), beta.swapaxes(1, 2)[..., None]
    log_decay, last = log_decay.swapaxes(1, 2), first[:, -1:]
    total = jnp.cumsum(log_decay, axis=2)  # [B, H, C]
    # Sums from token j to token i >= j. Differences of `total` would have the rounding errors of all earlier tokens.
    ones = jnp.tril(jnp.ones((CHUNK, CHUNK)))
    later = log_decay[..., None] * jnp.tril(ones, -1)[None, None]
    sums = jnp.einsum("il,bhlj->bhij", ones, later, precision="highest")

    def decays(logarithm, mask):
        return jnp.exp(jnp.where(mask, logarithm, -jnp.inf))

    is_visible = jnp.tril(first[:, :, None] == first[:, None, :])
    between = decays(sums, is_visible[:, None])
    since_start = decays(total, (first == previous[:, None])[:, None])[..., None]
    until_end = decays(sums[..., -1, :], (first == last)[:, None])[..., None]
    whole = decays(total[..., -1:], (last == previous[:, None])[:, None])[..., None]

    # The change of the state by each token depends on the changes by the earlier tokens of the chunk.
    system = beta * jnp.einsum("bhid,bhjd->bhij", k, k) * between
    target = beta * (v - since_start * jnp.einsum("bhcd,bhde->bhce", k, memory))
    change = jnp.einsum("bhij,bhje->bhie", unit_lower_inverse(system), target)
    scores = jnp.einsum("bhid,bhjd->bhij", q, k) * between
    y = since_start * jnp.einsum("bhcd,bhde->bhce", q, memory) + jnp.einsum("bhij,bhje->bhie", scores, change)
    memory = whole * memory + jnp.einsum("bhcd,bhce->bhde", until_end * k, change)
    return (memory, last[:, 0]), y.swapaxes(1, 2)


@jax.custom_vjp
def unit_lower_inverse(matrix: Float[Array, "*M N N"]) -> Float[Array, "*M N N"]:
    """Computes the inverses of triangular matrices with batched matmuls.

    The inverses of blocks on the diagonal are combined into inverses of blocks of twice the size, which is as accurate
    as forward substitution, in contrast to products of powers of the matrix. `jax.lax.linalg.triangular_solve` is not
    used, because concurrent calls can deadlock on CPUs: each call blocks a thread of the pool while it waits for other
    threads of the same pool.

    Args:
      matrix: Matrices, whose size is a power of two. Elements on and above the diagonal are not read and count as those
        of the unit matrix.

    Returns:
      The inverses.
    """
    size, width = matrix.shape[-1], 1
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=matrix.dtype), matrix.shape)
    while width < size:
        row, column = np.indices((size, size)) // width
        joins_blocks = jnp.asarray((row == column + 1) & (row % 2 == 1)).reshape(
            (1,) * (matrix.ndim - 2) + (size, size)
        )
        inverse = inverse - _product(inverse, jnp.where(joins_blocks, matrix, 0), inverse)
        width *= 2
    return inverse


def _inverse_forward(matrix):
    inverse = unit_lower_inverse(matrix)
    return inverse, inverse


def _inverse_backward(inverse, d_inverse):
    transposed = inverse.swapaxes(-1, -2)
    return (jnp.tril(-_product(transposed, d_inverse, transposed), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _product(a, b, c):
    return jnp.matmul(jnp.matmul(a, b, precision="highest"), c, precision="highest")


def _packed(config, inputs, first):
    """Returns the outputs of packed rows, and the state after the last token of each row."""

    @jax.checkpoint  # Otherwise the backward pass would store a copy of the inputs for each distance.
    def heads(qkv, conv):
        return split_heads(config, causal_convolution(qkv, conv, first))

    # Each device processes its local rows and heads. The compiler might gather them for the loop over chunks.
    by_rows, by_heads = PartitionSpec(ROWS, None), PartitionSpec(ROWS, None, "tensor")
    rule = on_each_device(packed_delta_rule, (*[by_heads] * 5, by_rows), (by_heads, PartitionSpec(ROWS, "tensor")))
    q, k, v = heads(inputs.qkv, inputs.conv)
    y, memory = rule(q, k, v, inputs.log_decay, inputs.beta.astype(jnp.float32), first)
    return y.astype(inputs.qkv.dtype), memory
