"""Log-probability and entropy of response tokens, computed without storing the [tokens, vocabulary] logits.

Only the selected tokens pass through the head, in chunks. The backward pass recomputes the logits of each chunk. It
accumulates the gradient of the head in float32, regardless of the type of the weights.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.matmul import take_rows, transposed
from poly_epo_jax.parallel.devices import DEVICES, device_name
from poly_epo_jax.parallel.sharding import ROWS, on_each_device, platform

LOGITS_SHARE = 0.02
"""Maximum fraction of accelerator memory for the float32 logits of a chunk, without arrays computed from them."""


def chunk_size(device: str, vocab_size: int) -> int:
    """Returns the number of tokens per chunk on a device.

    On CPUs, the logits of a chunk fit in the cache. On accelerators, each chunk reads the head, and reads and writes
    the float32 sum of its gradient. According to vendor specifications, this takes as long as the matmuls of 1,024
    tokens on a v6e, and a third of their time on a v5p. The fraction halves when the chunk size doubles. Chunks are
    therefore the largest power of two whose logits fit in LOGITS_SHARE of the memory that JAX may use.

    Args:
      device: Key of DEVICES, or the name of another device.
      vocab_size: Size of the vocabulary.

    Returns:
      The number of tokens: 128 on CPUs, and 1024 on devices whose memory size is unknown.
    """
    if device == "cpu":
        return 128
    memory_bytes = DEVICES[device].memory_bytes if device in DEVICES else None
    if not memory_bytes:
        return 1024
    tokens = LOGITS_SHARE * memory_bytes * DEVICES[device].jax_share / (vocab_size * 4)
    return 1 << max(0, int(tokens).bit_length() - 1)


def _default_chunk(vocab_size: int) -> int:
    """Returns the chunk size for the devices of the current mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return chunk_size(device_name(device.device_kind) if device else platform(), vocab_size)


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    wanted: Bool[Array, "B T"],
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes log p(target) and the entropy of p = softmax(hidden head' / temperature) for selected tokens.

    The time is proportional to the number of selected tokens, but array shapes do not depend on it. Under a mesh, each
    device processes its local rows and a part of the T positions with the full head. The head is gathered once, so that
    no collective runs inside the loop over chunks.

    Args:
      hidden: Final hidden states. Under a mesh, B must be divisible by `row_shards`, and T by the size of the
        `tensor` axis.
      head: Output embedding.
      targets: Token whose log-probability is computed at each position.
      wanted: Mask of the selected tokens.
      temperature: Sampling temperature.
      chunk_tokens: Number of tokens per chunk. If None, `chunk_size` selects it for the devices of the mesh.

    Returns:
      A tuple of the log-probabilities and the entropies, in nats, as float32 [B, T]. Both are 0 where `wanted` is
      False.
    """
    chunk = chunk_tokens or _default_chunk(len(head))
    return _sharded_logprobs(hidden, head, targets, wanted, temperature, chunk)


TOKENS_SPEC = PartitionSpec(ROWS, "tensor")
HIDDEN_SPEC = PartitionSpec(ROWS, "tensor", None)
HEAD_SPEC = PartitionSpec("tensor", "fsdp")
GATHERED_AXES = {"fsdp": 1, "tensor": 0}
"""Axis of the head [V, D] that is sharded over each mesh axis."""


def _split_axes():
    """Returns the names of the mesh axes with more than one device, in order. Returns [] without a mesh."""
    return [name for name, size in jax.sharding.get_abstract_mesh().shape.items() if size > 1]


def _gather_head(head):
    for name in _split_axes():
        if name in GATHERED_AXES:
            head = jax.lax.all_gather(head, name, axis=GATHERED_AXES[name], tiled=True)
    return head


def _scatter_head(gradient):
    """Sums the gradient [D, V] of the full head over all devices. Each device keeps its shard."""
    for name in _split_axes():
        if name in GATHERED_AXES:
            gradient = jax.lax.psum_scatter(gradient, name, scatter_dimension=1 - GATHERED_AXES[name], tiled=True)
        else:
            gradient = jax.lax.psum(gradient, name)
    return gradient


def _logits(hidden, head, temperature):
    return jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32) / temperature


def _for_each_chunk(indices, count, chunk_tokens, function, outputs):
    """Computes `outputs = function(chunk, outputs)` for consecutive chunks of the first `count` indices."""

    def body(chunk, outputs):
        return function(jax.lax.dynamic_slice_in_dim(indices, chunk * chunk_tokens, chunk_tokens), outputs)

    return jax.lax.fori_loop(0, (count + chunk_tokens - 1) // chunk_tokens, body, outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sharded_logprobs(hidden, head, targets, wanted, temperature, chunk_tokens):
    return _forward(hidden, head, targets, wanted, temperature, chunk_tokens)[0]


def _flat(hidden, targets, wanted, chunk_tokens):
    """Returns hidden [tokens, D], targets [tokens], indices and number of the selected tokens, and the chunk size."""
    size = targets.size
    chunk = min(chunk_tokens, size)
    # Indices of the selected tokens, in order. The remaining elements point past the last token.
    indices = jnp.nonzero(wanted.reshape(-1), size=size + -size % chunk, fill_value=size)[0]
    return hidden.reshape(size, -1), targets.reshape(-1), indices, jnp.sum(wanted), chunk


def _forward(hidden, head, targets, wanted, temperature, chunk_tokens):
    def local(hidden, head, targets, wanted):
        head, shape = _gather_head(head), targets.shape
        hidden, targets, indices, count, chunk = _flat(hidden, targets, wanted, chunk_tokens)

        def one_chunk(at, outputs):
            logits = _logits(take_rows(hidden, at), head, temperature)
            # One pass over the logits computes both sums, and another one their maximum. No other array is stored.
            largest = jnp.max(logits, axis=-1)
            shifted = logits - largest[:, None]
            total = jnp.sum(jnp.exp(shifted), axis=-1)
            log_normalizer = largest + jnp.log(total)
            chosen = jnp.take_along_axis(logits, take_rows(targets, at)[:, None], axis=-1)[:, 0] - log_normalizer
            values = chosen, jnp.log(total) - jnp.sum(jnp.exp(shifted) * shifted, axis=-1) / total, log_normalizer
            return tuple(x.at[at].set(value, mode="drop") for x, value in zip(outputs, values, strict=True))

        zeros = jnp.zeros(targets.shape, jnp.float32)
        outputs = _for_each_chunk(indices, count, chunk, one_chunk, (zeros, zeros, zeros))
        return tuple(x.reshape(shape) for x in outputs)

    # shard_map is not differentiated: `_forward` and `_backward` contain the collectives of both passes explicitly.
    each = on_each_device(
        local, (HIDDEN_SPEC, HEAD_SPEC, TOKENS_SPEC, TOKENS_SPEC), (TOKENS_SPEC, TOKENS_SPEC, TOKENS_SPEC)
    )
    logprobs, entropy, log_normalizer = each(hidden, head, targets, wanted)
    return (logprobs, entropy), (hidden, head, targets, wanted, entropy, log_normalizer)


def _backward(temperature, chunk_tokens, residuals, cotangents):
    def local(hidden, head, targets, wanted, *columns):
        full_head, shape = _gather_head(head), hidden.shape
        hidden, targets, indices, count, chunk = _flat(hidden, targets, wanted, chunk_tokens)
        columns = [x.reshape(-1) for x in columns]

        def one_chunk(at, gradients):
            d_hidden, d_head = gradients
            x = take_rows(hidden, at)
            mean, normalizer, d_logprobs, d_entropy = (take_rows(x, at)[:, None] for x in columns)
            log_p = _logits(x, full_head, temperature) - normalizer
            d_logits = -jnp.exp(log_p) * (d_logprobs + d_entropy * (log_p + mean))
            # The comparison is fused with the line above. A scatter would be a separate pass over the logits.
            is_target = jnp.arange(len(full_head))[None] == take_rows(targets, at)[:, None]
            d_logits = jnp.where(is_target, d_logits + d_logprobs, d_logits)
            d_logits = (d_logits / temperature).astype(hidden.dtype)
            d_x = jnp.einsum("tv,vd->td", d_logits, full_head, preferred_element_type=jnp.float32)
            d_head += jnp.einsum("dt,tv->dv", transposed(x), d_logits, preferred_element_type=jnp.float32)
            return d_hidden.at[at].set(d_x.astype(hidden.dtype), mode="drop"), d_head

        gradients = jnp.zeros_like(hidden), jnp.zeros(full_head.shape[::-1], jnp.float32)
        d_hidden, d_head = _for_each_chunk(indices, count, chunk, one_chunk, gradients)
        # Transposed after scattering, because transposing the full gradient would create a second copy of it.
        return d_hidden.reshape(shape), _scatter_head(d_head).T.astype(head.dtype)

    in_specs = (HIDDEN_SPEC, HEAD_SPEC, TOKENS_SPEC, TOKENS_SPEC, TOKENS_SPEC, TOKENS_SPEC, TOKENS_SPEC, TOKENS_SPEC)
    d_hidden, d_head = on_each_device(local, in_specs, (HIDDEN_SPEC, HEAD_SPEC))(*residuals, *cotangents)
    return d_hidden, d_head, None, None


_sharded_logprobs.defvjp(_forward, _backward)
