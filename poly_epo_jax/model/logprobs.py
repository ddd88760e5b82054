"""Log-probability and entropy of each target token, never holding the [tokens, vocabulary] logits.

The tokens go through the head in chunks; the backward pass makes each chunk's logits anew and accumulates the head's
gradient in float32, whatever the weights' type.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from poly_epo_jax.model.sharding import ROWS

CHUNK_TOKENS = 1024


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(target) and entropy (nats) of softmax(hidden head' / temperature), both float32.

    Under a mesh each device takes its own rows and its own share of the T positions (T must divide by the tensor
    axis) with the whole head, gathered once, so that no collective runs inside the vocabulary loop.
    """

    def local(hidden, head, targets):
        flat = hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1)
        outputs = _chunked_logprobs(*flat, temperature, chunk_tokens)
        return jax.tree.map(lambda x: x.reshape(targets.shape), outputs)

    def gathered(hidden, head, targets):
        head = jax.lax.all_gather(head, "tensor", axis=0, tiled=True)
        return local(hidden, jax.lax.all_gather(head, "fsdp", axis=1, tiled=True), targets)

    if jax.sharding.get_abstract_mesh().empty:
        return local(hidden, head, targets)
    tokens = PartitionSpec(ROWS, "tensor")
    return jax.shard_map(
        gathered,
        in_specs=(PartitionSpec(ROWS, "tensor", None), PartitionSpec("tensor", "fsdp"), tokens),
        out_specs=(tokens, tokens),
        check_vma=False,
    )(hidden, head, targets)


def _logits(hidden, head, temperature):
    return jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32) / temperature


def _chunks(x, chunk_tokens):
    """[tokens, ...] -> [chunks, chunk_tokens, ...], padded with zeros."""
    padded = jnp.pad(x, [(0, -x.shape[0] % chunk_tokens)] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(-1, chunk_tokens, *x.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _chunked_logprobs(hidden, head, targets, temperature, chunk_tokens):
    return _forward(hidden, head, targets, temperature, chunk_tokens)[0]


def _forward(hidden, head, targets, temperature, chunk_tokens):
    def one_chunk(chunk):
        hidden, targets = chunk
        logits = _logits(hidden, head, temperature)
        log_normalizer = jax.nn.logsumexp(logits, axis=-1)
        log_p = logits - log_normalizer[:, None]
        logprobs = jnp.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0]
        return logprobs, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1), log_normalizer

    size = min(chunk_tokens, targets.shape[0])
    outputs = jax.lax.map(one_chunk, (_chunks(hidden, size), _chunks(targets, size)))
    logprobs, entropy, log_normalizer = (x.reshape(-1)[: targets.shape[0]] for x in outputs)
    return (logprobs, entropy), (hidden, head, targets, entropy, log_normalizer)


def _backward(temperature, chunk_tokens, residuals, cotangents):
    hidden, head, targets, entropy, log_normalizer = residuals

    def one_chunk(head_gradient, chunk):
        hidden, targets, entropy, log_normalizer, d_logprobs, d_entropy = chunk
        log_p = _logits(hidden, head, temperature) - log_normalizer[:, None]
        d_logits = -jnp.exp(log_p) * (d_logprobs[:, None] + d_entropy[:, None] * (log_p + entropy[:, None]))
        d_logits = d_logits.at[jnp.arange(targets.shape[0]), targets].add(d_logprobs)
        d_logits = (d_logits / temperature).astype(hidden.dtype)
        d_hidden = jnp.einsum("tv,vd->td", d_logits, head, preferred_element_type=jnp.float32)
        d_head = jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=jnp.float32)
        return head_gradient + d_head, d_hidden.astype(hidden.dtype)

    size = min(chunk_tokens, targets.shape[0])
    chunks = [_chunks(x, size) for x in (hidden, targets, entropy, log_normalizer, *cotangents)]
    d_head, d_hidden = jax.lax.scan(one_chunk, jnp.zeros(head.shape, jnp.float32), tuple(chunks))
    return d_hidden.reshape(-1, hidden.shape[-1])[: targets.shape[0]], d_head.astype(head.dtype), None


_chunked_logprobs.defvjp(_forward, _backward)
