"""Log-probability and entropy of the response tokens, never holding the [tokens, vocabulary] logits.

Only the tokens that are asked for go through the head, in chunks; the backward pass makes each chunk's logits anew and
accumulates the head's gradient in float32, whatever the weights' type.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.product import transposed
from poly_epo_jax.model.sharding import ROWS

# Tokens at once: enough for an accelerator's matrix units; on a CPU, few enough for the logits to stay in the cache.
CHUNK_TOKENS = {"cpu": 128}
ACCELERATOR_CHUNK_TOKENS = 1024


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
    chunk = chunk_tokens or CHUNK_TOKENS.get(jax.default_backend(), ACCELERATOR_CHUNK_TOKENS)

    def local(hidden, head, targets, wanted):
        size = targets.size
        # The wanted tokens' indices, first to last; what is left of the array points behind the last token.
        indices = jnp.nonzero(wanted.reshape(-1), size=size + -size % min(chunk, size), fill_value=size)[0]
        flat = hidden.reshape(size, -1), head, targets.reshape(-1), indices, jnp.sum(wanted)
        outputs = _chunked_logprobs(*flat, temperature, min(chunk, size))
        return jax.tree.map(lambda x: x.reshape(targets.shape), outputs)

    mesh = jax.sharding.get_abstract_mesh()

    def gathered(hidden, head, targets, wanted):
        for axis, name in enumerate(("tensor", "fsdp")):
            if mesh.shape[name] > 1:
                head = jax.lax.all_gather(head, name, axis=axis, tiled=True)
        return local(hidden, head, targets, wanted)

    if mesh.empty:
        return local(hidden, head, targets, wanted)
    tokens = PartitionSpec(ROWS, "tensor")
    return jax.shard_map(
        gathered,
        in_specs=(PartitionSpec(ROWS, "tensor", None), PartitionSpec("tensor", "fsdp"), tokens, tokens),
        out_specs=(tokens, tokens),
        check_vma=False,
    )(hidden, head, targets, wanted)


def _logits(hidden, head, temperature):
    return jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32) / temperature


def _take(x, indices):
    """Rows of x; zeros for indices behind its end."""
    return x.at[indices].get(mode="fill", fill_value=0)


def _for_each_chunk(indices, count, chunk_tokens, function, outputs):
    """outputs = function(a chunk of indices, outputs) for as many chunks as hold `count` indices."""

    def body(chunk, outputs):
        return function(jax.lax.dynamic_slice_in_dim(indices, chunk * chunk_tokens, chunk_tokens), outputs)

    return jax.lax.fori_loop(0, (count + chunk_tokens - 1) // chunk_tokens, body, outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _chunked_logprobs(hidden, head, targets, indices, count, temperature, chunk_tokens):
    return _forward(hidden, head, targets, indices, count, temperature, chunk_tokens)[0]


def _forward(hidden, head, targets, indices, count, temperature, chunk_tokens):
    def one_chunk(at, outputs):
        logits = _logits(_take(hidden, at), head, temperature)
        log_normalizer = jax.nn.logsumexp(logits, axis=-1)
        log_p = logits - log_normalizer[:, None]
        chosen = jnp.take_along_axis(log_p, _take(targets, at)[:, None], axis=-1)[:, 0]
        values = chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1), log_normalizer
        return tuple(x.at[at].set(value, mode="drop") for x, value in zip(outputs, values, strict=True))

    zeros = jnp.zeros(targets.shape, jnp.float32)
    outputs = _for_each_chunk(indices, count, chunk_tokens, one_chunk, (zeros, zeros, zeros))
    logprobs, entropy, log_normalizer = outputs
    return (logprobs, entropy), (hidden, head, targets, indices, count, entropy, log_normalizer)


def _backward(temperature, chunk_tokens, residuals, cotangents):
    hidden, head, targets, indices, count, entropy, log_normalizer = residuals

    def one_chunk(at, gradients):
        d_hidden, d_head = gradients
        chunk, columns = _take(hidden, at), (log_normalizer, entropy, *cotangents)
        normalizer, mean, d_logprobs, d_entropy = (_take(x, at)[:, None] for x in columns)
        log_p = _logits(chunk, head, temperature) - normalizer
        d_logits = -jnp.exp(log_p) * (d_logprobs + d_entropy * (log_p + mean))
        d_logits = d_logits.at[jnp.arange(chunk_tokens), _take(targets, at)].add(d_logprobs[:, 0])
        d_logits = (d_logits / temperature).astype(hidden.dtype)
        d_chunk = jnp.einsum("tv,vd->td", d_logits, head, preferred_element_type=jnp.float32)
        d_head += jnp.einsum("dt,tv->dv", transposed(chunk), d_logits, preferred_element_type=jnp.float32)
        return d_hidden.at[at].set(d_chunk.astype(hidden.dtype), mode="drop"), d_head

    gradients = jnp.zeros_like(hidden), jnp.zeros(head.shape[::-1], jnp.float32)
    d_hidden, d_head = _for_each_chunk(indices, count, chunk_tokens, one_chunk, gradients)
    return d_hidden, d_head.T.astype(head.dtype), None, None, None


_chunked_logprobs.defvjp(_forward, _backward)
