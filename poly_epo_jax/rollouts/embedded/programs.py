"""The device programs of the slots: start, insert prompts, decode until some slots have finished, read."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from poly_epo_jax.model import decoding
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import KVCache
from poly_epo_jax.parallel.sharding import ROWS
from poly_epo_jax.rollouts.embedded.token_sampling import sample_tokens
from poly_epo_jax.types import Params

MAX_STEPS = 256  # per call of `decode`, which cannot be interrupted: cancellation waits for it


class SlotState(NamedTuple):
    """Per slot [B]: `token` is the next one to be read, at `position`; `length` and `limit` count response tokens."""

    active: jax.Array
    seed: jax.Array
    token: jax.Array
    position: jax.Array
    length: jax.Array
    limit: jax.Array
    tokens: jax.Array  # [B, T]
    logprobs: jax.Array  # [B, T]
    cache: KVCache


def on_rows(state: SlotState) -> SlotState:
    """Pins the layout, so that every program accepts the state as the others return it."""
    heads = PartitionSpec(ROWS, "tensor")
    cache = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, heads), state.cache)
    rest = jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(ROWS)), state._replace(cache=KVCache((), ()))
    )
    return rest._replace(cache=cache)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def start(config: ModelConfig, num_slots: int, max_tokens: int, size: int) -> SlotState:
    def zeros(dtype, *shape):
        return jnp.zeros((num_slots, *shape), dtype)

    return on_rows(
        SlotState(
            active=zeros(bool),
            seed=zeros(jnp.uint32),
            token=zeros(jnp.int32),
            position=zeros(jnp.int32),
            length=zeros(jnp.int32),
            limit=zeros(jnp.int32),
            tokens=zeros(jnp.int32, max_tokens),
            logprobs=zeros(jnp.float32, max_tokens),
            cache=decoding.init_cache(config, num_slots, size),
        )
    )


@partial(jax.jit, static_argnames="size")
def resize(state: SlotState, size: int) -> SlotState:
    return on_rows(state._replace(cache=state.cache.resized(size)))


prefill = jax.jit(decoding.prefill, static_argnums=0)


@partial(jax.jit, donate_argnames="state")
def insert(
    state: SlotState,
    prefilled: KVCache,
    rows: Int[Array, " R"],
    prompts: Int[Array, " R"],
    seeds: UInt32[Array, " R"],
    tokens: Int[Array, " R"],
    positions: Int[Array, " R"],
    limits: Int[Array, " R"],
) -> SlotState:
    """Copies prompts into slots up to their last token, which decoding reads first. A row number of B is skipped."""

    def put(x: jax.Array, values: jax.Array | int | bool) -> jax.Array:
        return x.at[rows].set(values, mode="drop")

    return on_rows(
        state._replace(
            active=put(state.active, True),
            seed=put(state.seed, seeds),
            token=put(state.token, tokens),
            position=put(state.position, positions),
            length=put(state.length, 0),
            limit=put(state.limit, limits),
            cache=state.cache.with_rows(rows, prefilled, prompts),
        )
    )


def next_token(
    config: ModelConfig, weights: Params, state: SlotState, stop_ids: Int[Array, " S"], **sampling: Any
) -> SlotState:
    """Decodes one more token in every active slot; `sampling` is passed on to `sample_tokens`.

    Each device takes its own rows, with whole weights: left to itself, the compiler gathers what is written to the
    caches. It does split heads, MLP and vocabulary over tensor, with an all-reduce after each half of a layer.
    """
    one_token = partial(_next_token, config, **sampling)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > mesh.shape["tensor"]:
        rows, whole = PartitionSpec(ROWS), PartitionSpec()
        one_token = jax.shard_map(
            one_token, in_specs=(whole, rows, whole), out_specs=rows, axis_names=set(ROWS), check_vma=False
        )
    return one_token(weights, state, stop_ids)


def _next_token(
    config: ModelConfig, weights: Params, state: SlotState, stop_ids: Int[Array, " S"], **sampling: Any
) -> SlotState:
    rows = jnp.arange(len(state.token))
    logits, cache = decoding.decode(config, weights, state.token, state.position, state.cache)
    token, logprob = sample_tokens(logits, state.seed, state.length, **sampling)
    place = jnp.where(state.active, state.length, state.tokens.shape[1])  # out of bounds: not written
    length = state.length + state.active
    stopped = (token[:, None] == stop_ids[None]).any(axis=1)
    return state._replace(
        active=state.active & ~stopped & (length < state.limit),
        token=token,
        position=state.position + state.active,
        length=length,
        tokens=state.tokens.at[rows, place].set(token, mode="drop"),
        logprobs=state.logprobs.at[rows, place].set(logprob, mode="drop"),
        cache=cache,
    )


@partial(
    jax.jit,
    static_argnames=("config", "turnover", "temperature", "top_p", "top_k"),
    donate_argnames="state",
)
def decode(
    config: ModelConfig,
    weights: Params,
    state: SlotState,
    stop_ids: Int[Array, " S"],
    *,
    turnover: int,
    temperature: float,
    top_p: float,
    top_k: int,
) -> tuple[SlotState, Int[Array, "3 B"]]:
    """Decodes until `turnover` more slots have finished, all have, or one has reached the end of the cache.

    Returns:
      The state, and for each slot whether it is active, its length and its position.
    """
    size = state.cache.length
    enough = jnp.maximum(state.active.sum() - turnover, 0)

    def goes_on(carry: tuple[jax.Array, SlotState]) -> Bool[Array, ""]:
        step, state = carry
        # A single sum, so that devices with different rows agree with one collective per token.
        active, at_the_end = jnp.stack([state.active, state.active & (state.position >= size)]).sum(axis=1)
        return (active > enough) & (at_the_end == 0) & (step < MAX_STEPS)

    def one_token(carry: tuple[jax.Array, SlotState]) -> tuple[jax.Array, SlotState]:
        step, state = carry
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        return step + 1, next_token(config, weights, state, stop_ids, **sampling)

    _, state = jax.lax.while_loop(goes_on, one_token, (jnp.zeros((), jnp.int32), state))
    return on_rows(state), jnp.stack([state.active.astype(jnp.int32), state.length, state.position])


@jax.jit
def read(state: SlotState, rows: Int[Array, " R"]) -> tuple[Int[Array, "R T"], Float[Array, "R T"]]:
    return state.tokens[rows], state.logprobs[rows]
