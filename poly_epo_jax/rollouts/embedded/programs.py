"""Compiled programs that operate on decoding slots: create the state, prefill and insert prompts, decode, read tokens.

A slot is one row of the decoding state and generates one response at a time.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from poly_epo_jax.model import decoding
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.parallel.compiler_options import Jit
from poly_epo_jax.parallel.sharding import ROWS
from poly_epo_jax.rollouts.embedded.token_sampling import sample_tokens
from poly_epo_jax.types import Params

MAX_STEPS = 256  # Maximum number of tokens per call of `decode`. Cancellation waits until the call has finished.


class SlotState(NamedTuple):
    """Decoding state of B slots.

    Attributes:
      active: Whether the slot is generating [B], bool.
      seed: Seed of the generation [B], uint32.
      lattice: Point of the generation and spacing of the points of its group [B, 2], see `sample_tokens`.
      token: Next input token [B], int32.
      position: Position of `token` in the sequence [B], int32.
      length: Number of response tokens generated so far [B], int32.
      limit: Maximum number of response tokens [B], int32.
      tokens: Response tokens [B, T], int32. The first `length` tokens of a row are valid.
      logprobs: Log-probabilities [B, T] of these tokens, float32.
      cache: Keys and values of the sequences.
    """

    active: jax.Array
    seed: jax.Array
    lattice: jax.Array
    token: jax.Array
    position: jax.Array
    length: jax.Array
    limit: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    cache: decoding.KVCache


def constrain_rows(state: SlotState) -> SlotState:
    """Shards the state over rows, and its cache also over heads.

    All programs return states with these shardings, so that each program accepts the result of the others without
    recompilation.
    """
    heads = PartitionSpec(ROWS, "tensor")
    cache = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, heads), state.cache)
    rest = jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(ROWS)),
        state._replace(cache=decoding.KVCache((), ())),
    )
    return rest._replace(cache=cache)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def start(config: ModelConfig, num_slots: int, max_tokens: int, size: int) -> SlotState:
    """Creates a state without active slots.

    Args:
      config: Configuration of the model.
      num_slots: Number B of slots.
      max_tokens: Maximum number T of response tokens.
      size: Length of the cache, in tokens.

    Returns:
      The state.
    """

    def zeros(dtype, *shape):
        return jnp.zeros((num_slots, *shape), dtype)

    return constrain_rows(
        SlotState(
            active=zeros(bool),
            seed=zeros(jnp.uint32),
            lattice=zeros(jnp.float32, 2),
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
    """Copies the state into one with another cache length.

    Args:
      state: The decoding state.
      size: New length of the cache, in tokens. It must fit all active sequences.

    Returns:
      The resized state.
    """
    return constrain_rows(state._replace(cache=state.cache.resized(size)))


prefill = Jit(decoding.prefill, static_argnums=0)


@partial(jax.jit, donate_argnames="state")
def insert(
    state: SlotState,
    prefilled: decoding.KVCache,
    rows: Int[Array, " R"],
    prompts: Int[Array, " R"],
    seeds: UInt32[Array, " R"],
    lattice: Float[Array, "R 2"],
    tokens: Int[Array, " R"],
    positions: Int[Array, " R"],
    limits: Int[Array, " R"],
) -> SlotState:
    """Starts R generations in free slots.

    The keys and values of a prompt are copied to the cache of its slot. The last token of the prompt is the first input
    token of decoding, which overwrites the keys and values of this token.

    Args:
      state: The decoding state. Its buffers are donated.
      prefilled: Cache with the keys and values of prompts.
      rows: Slots [R]. Entries equal to B are skipped.
      prompts: Rows [R] of the prompts in `prefilled`.
      seeds: Seeds [R] of the generations.
      lattice: Points of the generations and spacings [R, 2].
      tokens: Last tokens [R] of the prompts.
      positions: Positions [R] of these tokens.
      limits: Maximum numbers [R] of response tokens.

    Returns:
      The updated state.
    """

    def put(x: jax.Array, values: jax.Array | int | bool) -> jax.Array:
        return x.at[rows].set(values, mode="drop")

    return constrain_rows(
        state._replace(
            active=put(state.active, True),
            seed=put(state.seed, seeds),
            lattice=put(state.lattice, lattice),
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
    """Generates one token in every active slot.

    Rows are sharded manually with `shard_map`, because the compiler would otherwise gather the values that are written
    to the caches. Each device processes its own rows. Attention heads, MLP and vocabulary are sharded over `tensor` by
    the compiler, with one all-reduce after each half of a layer.

    Args:
      config: Configuration of the model.
      weights: Weights from `decoding.gather_weights_over_fsdp`.
      state: The decoding state.
      stop_ids: Token ids [S] that end a generation.
      **sampling: `temperature`, `top_p` and `top_k`, see `sample_tokens`.

    Returns:
      The updated state.
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
    logits, cache = decoding.decode(config, weights, state.token, state.position, state.active, state.cache)
    token, logprob, lattice = sample_tokens(logits, state.seed, state.length, state.lattice, **sampling)
    place = jnp.where(state.active, state.length, state.tokens.shape[1])  # Out-of-bounds writes are dropped.
    length = state.length + state.active
    stopped = (token[:, None] == stop_ids[None]).any(axis=1)
    return state._replace(
        active=state.active & ~stopped & (length < state.limit),
        lattice=lattice,
        token=token,
        position=state.position + state.active,
        length=length,
        tokens=state.tokens.at[rows, place].set(token, mode="drop"),
        logprobs=state.logprobs.at[rows, place].set(logprob, mode="drop"),
        cache=cache,
    )


@partial(
    Jit,
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
    """Decodes until `turnover` more slots or all slots have finished, or a slot has reached the end of the cache.

    One call generates at most MAX_STEPS tokens per slot.

    Args:
      config: Configuration of the model.
      weights: Weights from `decoding.gather_weights_over_fsdp`.
      state: The decoding state. Its buffers are donated.
      stop_ids: Token ids [S] that end a generation.
      turnover: Number of slots that must finish before the call returns.
      temperature: Divisor of the logits. 0 is greedy.
      top_p: Probability mass of the kept tokens. 1 disables the filter.
      top_k: Number of most likely tokens to keep. 0 disables the filter.

    Returns:
      The updated state, and an int32 array [3, B] with the rows `active`, `length` and `position` of the state.
    """
    size = state.cache.length
    enough = jnp.maximum(state.active.sum() - turnover, 0)

    def should_continue(carry: tuple[jax.Array, SlotState]) -> Bool[Array, ""]:
        step, state = carry
        # Both counts are computed in a single sum, which requires only one collective per token.
        active, at_the_end = jnp.stack([state.active, state.active & (state.position >= size)]).sum(axis=1)
        return (active > enough) & (at_the_end == 0) & (step < MAX_STEPS)

    def one_token(carry: tuple[jax.Array, SlotState]) -> tuple[jax.Array, SlotState]:
        step, state = carry
        return step + 1, next_token(config, weights, state, stop_ids, temperature=temperature, top_p=top_p, top_k=top_k)

    _, state = jax.lax.while_loop(should_continue, one_token, (jnp.zeros((), jnp.int32), state))
    return constrain_rows(state), jnp.stack([state.active.astype(jnp.int32), state.length, state.position])


@jax.jit
def read(state: SlotState, rows: Int[Array, " R"]) -> tuple[Int[Array, "R T"], Float[Array, "R T"]]:
    """Reads the results of slots.

    Args:
      state: The decoding state.
      rows: Slots [R].

    Returns:
      Response tokens [R, T] and their log-probabilities [R, T]. Entries beyond the response length are undefined.
    """
    return state.tokens[rows], state.logprobs[rows]
