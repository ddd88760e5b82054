"""Log-probability and entropy of the response tokens, without ever holding the [tokens, vocabulary] logits.

Only the wanted tokens go through the head, in chunks. The backward pass recomputes each chunk's logits, and accumulates
the head's gradient in float32, whatever the weights' type.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.matmul import transposed
from poly_epo_jax.parallel.devices import DEVICES, device_name
from poly_epo_jax.parallel.sharding import ROWS, platform

LOGITS_SHARE = 0.02
"""The largest share of an accelerator's memory for a chunk's float32 logits, besides what is computed from them."""


def chunk_size(device: str, vocab_size: int) -> int:
    """Tokens per chunk on a device, which is a key of DEVICES or the name of another.

    On a CPU there are so few that the logits stay in cache. For every chunk an accelerator reads the head, and reads
    and writes the float32 sum of its gradient: by the makers' figures, at 1,024 tokens this takes as long as the
    chunk's matmuls on a v6e and a third as long on a v5p, and half of that with twice as many. So chunks are the
    largest power of two within LOGITS_SHARE of the memory that JAX may use; on an unknown device they are 1,024 tokens.
    """
    if device == "cpu":
        return 128
    memory_bytes = DEVICES[device].memory_bytes if device in DEVICES else None
    if not memory_bytes:
        return 1024
    tokens = LOGITS_SHARE * memory_bytes * DEVICES[device].jax_share / (vocab_size * 4)
    return 1 << max(0, int(tokens).bit_length() - 1)


def _default_chunk(vocab_size: int) -> int:
    """The chunk size for the devices of the current mesh."""
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
    """log p(target) and entropy (nats) of softmax(hidden head' / temperature), both float32; 0 where not `wanted`.

    Time follows the number of wanted tokens; shapes do not depend on it. Under a mesh each device takes its own rows
    and its own share of the T positions (T must divide by the tensor axis) with the whole head, gathered once, so that
    no collective runs inside the vocabulary loop.
    """
    chunk = chunk_tokens or _default_chunk(len(head))
    return _sharded_logprobs(hidden, head, targets, wanted, temperature, chunk)


TOKENS = PartitionSpec(ROWS, "tensor")
HIDDEN = PartitionSpec(ROWS, "tensor", None)
HEAD = PartitionSpec("tensor", "fsdp")
GATHERED = {"fsdp": 1, "tensor": 0}
"""The axis of the head [V, D] that each mesh axis splits."""


def _on_each_device(function, in_specs, out_specs):
    """`function` applied to each device's own part under a mesh, else `function` itself.

    shard_map is not differentiated: both passes are written here, with the collectives that they need.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _split_axes():
    """The names of the mesh's axes with more than one device, in order; none without a mesh."""
    return [name for name, size in jax.sharding.get_abstract_mesh().shape.items() if size > 1]


def _gather_head(head):
    for name in _split_axes():
        if name in GATHERED:
            head = jax.lax.all_gather(head, name, axis=GATHERED[name], tiled=True)
    return head


def _scatter_head(gradient):
    """Sums the whole head's gradient [D, V] over all devices; each keeps its own part."""
    for name in _split_axes():
        if name in GATHERED:
            gradient = jax.lax.psum_scatter(gradient, name, scatter_dimension=1 - GATHERED[name], tiled=True)
        else:
            gradient = jax.lax.psum(gradient, name)
    return gradient


def _logits(hidden, head, temperature):
    return jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32) / temperature


def _take(x, indices):
    """Rows of x; zeros for indices past its end."""
    return x.at[indices].get(mode="fill", fill_value=0)


def _for_each_chunk(indices, count, chunk_tokens, function, outputs):
    """outputs = function(a chunk of indices, outputs) for as many chunks as hold `count` indices."""

    def body(chunk, outputs):
        return function(jax.lax.dynamic_slice_in_dim(indices, chunk * chunk_tokens, chunk_tokens), outputs)

    return jax.lax.fori_loop(0, (count + chunk_tokens - 1) // chunk_tokens, body, outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sharded_logprobs(hidden, head, targets, wanted, temperature, chunk_tokens):
    return _forward(hidden, head, targets, wanted, temperature, chunk_tokens)[0]


def _flat(hidden, targets, wanted, chunk_tokens):
    """hidden [tokens, D], targets [tokens], indices of the wanted tokens, their number, and the size of a chunk."""
    size = targets.size
    chunk = min(chunk_tokens, size)
    # The wanted tokens' indices in order; the rest of the array points past the last token.
    indices = jnp.nonzero(wanted.reshape(-1), size=size + -size % chunk, fill_value=size)[0]
    return hidden.reshape(size, -1), targets.reshape(-1), indices, jnp.sum(wanted), chunk


def _forward(hidden, head, targets, wanted, temperature, chunk_tokens):
    def local(hidden, head, targets, wanted):
        head, shape = _gather_head(head), targets.shape
        hidden, targets, indices, count, chunk = _flat(hidden, targets, wanted, chunk_tokens)

        def one_chunk(at, outputs):
            logits = _logits(_take(hidden, at), head, temperature)
            log_normalizer = jax.nn.logsumexp(logits, axis=-1)
            log_p = logits - log_normalizer[:, None]
            chosen = jnp.take_along_axis(log_p, _take(targets, at)[:, None], axis=-1)[:, 0]
            values = chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1), log_normalizer
            return tuple(x.at[at].set(value, mode="drop") for x, value in zip(outputs, values, strict=True))

        zeros = jnp.zeros(targets.shape, jnp.float32)
        outputs = _for_each_chunk(indices, count, chunk, one_chunk, (zeros, zeros, zeros))
        return tuple(x.reshape(shape) for x in outputs)

    each = _on_each_device(local, (HIDDEN, HEAD, TOKENS, TOKENS), (TOKENS, TOKENS, TOKENS))
    logprobs, entropy, log_normalizer = each(hidden, head, targets, wanted)
    return (logprobs, entropy), (hidden, head, targets, wanted, entropy, log_normalizer)


def _backward(temperature, chunk_tokens, residuals, cotangents):
    def local(hidden, head, targets, wanted, *columns):
        whole, shape = _gather_head(head), hidden.shape
        hidden, targets, indices, count, chunk = _flat(hidden, targets, wanted, chunk_tokens)
        columns = [x.reshape(-1) for x in columns]

        def one_chunk(at, gradients):
            d_hidden, d_head = gradients
            x = _take(hidden, at)
            mean, normalizer, d_logprobs, d_entropy = (_take(x, at)[:, None] for x in columns)
            log_p = _logits(x, whole, temperature) - normalizer
            d_logits = -jnp.exp(log_p) * (d_logprobs + d_entropy * (log_p + mean))
            # The comparison is fused with the line above; a scatter would be a pass of its own.
            is_target = jnp.arange(len(whole))[None] == _take(targets, at)[:, None]
            d_logits = jnp.where(is_target, d_logits + d_logprobs, d_logits)
            d_logits = (d_logits / temperature).astype(hidden.dtype)
            d_x = jnp.einsum("tv,vd->td", d_logits, whole, preferred_element_type=jnp.float32)
            d_head += jnp.einsum("dt,tv->dv", transposed(x), d_logits, preferred_element_type=jnp.float32)
            return d_hidden.at[at].set(d_x.astype(hidden.dtype), mode="drop"), d_head

        gradients = jnp.zeros_like(hidden), jnp.zeros(whole.shape[::-1], jnp.float32)
        d_hidden, d_head = _for_each_chunk(indices, count, chunk, one_chunk, gradients)
        # Transposed only after it is scattered: transposing the whole gradient would make a second copy of it.
        return d_hidden.reshape(shape), _scatter_head(d_head).T.astype(head.dtype)

    in_specs = (HIDDEN, HEAD, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS)
    d_hidden, d_head = _on_each_device(local, in_specs, (HIDDEN, HEAD))(*residuals, *cotangents)
    return d_hidden, d_head, None, None


_sharded_logprobs.defvjp(_forward, _backward)
