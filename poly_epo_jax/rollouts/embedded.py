"""A sampler inside the trainer: the policy's own weights, a static KV cache and one jitted decoding loop."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.qwen3 import KVCache, Qwen3
from poly_epo_jax.model.sharding import row_sharding
from poly_epo_jax.rollouts.tokens import encode_prompt, response_text
from poly_epo_jax.types import Generation, Group, Params, Problem, Sampling


class EmbeddedRollouts:
    """Decodes batches of prompts to the end; each prompt is read once for all of its generations.

    Args:
      model: the policy, possibly abstract: only its structure is used.
      stop_ids: a generation ends with any of these tokens.
      max_prompt_tokens: prompts are padded to this length; a longer one is refused.
      max_rows: generations decoded at once.
    """

    def __init__(
        self,
        model: Qwen3,
        mesh: Mesh,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        max_prompt_tokens: int,
        max_rows: int,
    ):
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.stop_ids = np.asarray(stop_ids, np.int32)
        self.max_prompt_tokens = max_prompt_tokens
        self.max_rows = max_rows
        self._decode = jax.jit(
            partial(_decode, nnx.split(model)[0]), static_argnames=("max_tokens", "temperature", "top_p", "top_k")
        )

    async def update_weights(self, params: Params, version: int) -> None:
        """Shares the trainer's arrays; nothing is copied."""
        self.params, self.version = params, version

    def close(self) -> None:
        """Nothing is held that is not the trainer's."""

    async def generate(
        self, problems: Sequence[Problem], num_generations: int, sampling: Sampling
    ) -> AsyncIterator[Group]:
        """Yields the problems' groups, chunk by chunk, in order.

        Raises:
          ValueError: a prompt is empty, or longer than `max_prompt_tokens`.
        """
        if not problems:
            return
        seeds = np.array([sampling.generation_seeds(problem, num_generations) for problem in problems])
        size = min(len(problems), max(1, self.max_rows // num_generations))
        rows = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        size = -(-size // rows) * rows  # every device gets the same number of prompts
        for start in range(0, len(problems), size):
            chunk = slice(start, start + size)
            for group in self._generate(problems[chunk], seeds[chunk], size, sampling):
                yield group

    def _generate(self, problems: Sequence[Problem], seeds: np.ndarray, size: int, sampling: Sampling) -> list[Group]:
        encoded = [encode_prompt(self.tokenizer, problem, self.max_prompt_tokens) for problem in problems]
        prompts = np.zeros((size, self.max_prompt_tokens), np.int32)
        valid = np.zeros(prompts.shape, bool)
        valid[:, -1] = True  # padding prompts too need one token to attend to
        for row, ids in enumerate(encoded):
            prompts[row, -len(ids) :], valid[row, -len(ids) :] = ids, True
        padded_seeds = np.zeros((size, seeds.shape[1]), np.uint32)
        padded_seeds[: len(seeds)] = seeds
        with jax.set_mesh(self.mesh):
            arrays = jax.device_put((prompts, valid, padded_seeds), row_sharding(self.mesh))
            decoded = self._decode(
                self.params,
                *arrays,
                self.stop_ids,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            )
        tokens, logprobs, lengths = (
            np.asarray(x).reshape(size, seeds.shape[1], *x.shape[1:]) for x in jax.device_get(decoded)
        )
        return [
            Group(problem, ids, tuple(self._generation(*row) for row in zip(*outputs, strict=True)))
            for problem, ids, *outputs in zip(problems, encoded, tokens, logprobs, lengths, strict=False)
        ]

    def _generation(self, tokens: np.ndarray, logprobs: np.ndarray, length: np.integer) -> Generation:
        token_ids = tokens[:length]
        stopped = bool(np.isin(token_ids[-1], self.stop_ids))
        text = response_text(self.tokenizer, token_ids, stopped)
        return Generation(token_ids, logprobs[:length], text, "stop" if stopped else "length", self.version)


class _State(NamedTuple):
    step: jax.Array
    logits: jax.Array  # [B, V] of the next token
    cache: KVCache
    done: jax.Array  # [B]
    tokens: jax.Array  # [B, max_tokens]
    logprobs: jax.Array  # [B, max_tokens]
    lengths: jax.Array  # [B]


def _decode(
    model_def: Any,
    params: Params,
    prompts: Int[Array, "Q L"],
    valid: Bool[Array, "Q L"],
    seeds: UInt32[Array, "Q N"],
    stop_ids: Int[Array, "S"],
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
) -> tuple[Int[Array, "B T"], Float[Array, "B T"], Int[Array, "B"]]:
    """Left-padded prompts -> tokens, log-probabilities and lengths of B = Q N generations, prompt by prompt."""
    model = nnx.merge(model_def, params)
    num_prompts, prompt_slots = prompts.shape
    batch, slots = seeds.size, prompt_slots + max_tokens
    prompt_lengths = valid.sum(axis=1, dtype=jnp.int32)
    positions = jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)

    def next_logits(hidden: jax.Array) -> jax.Array:
        return jnp.einsum("bd,vd->bv", hidden[:, -1], model.head, preferred_element_type=jnp.float32)

    causal = jnp.tril(jnp.ones((prompt_slots, slots), bool))
    visible = jnp.concatenate([valid, jnp.zeros((num_prompts, max_tokens), bool)], axis=1)
    # A padding position sees itself, for a softmax over nothing is not a number.
    mask = (causal[None] & visible[:, None]) | jnp.eye(prompt_slots, slots, dtype=bool)[None]
    hidden, cache = model.decode(prompts, positions, model.init_cache(num_prompts, slots), 0, mask)

    def per_generation(x: jax.Array, axis: int = 0) -> jax.Array:
        return jnp.repeat(x, seeds.shape[1], axis=axis, total_repeat_length=batch)

    keys = jax.vmap(jax.random.key)(seeds.reshape(-1))
    visible, prompt_lengths = per_generation(visible), per_generation(prompt_lengths)

    def step(state: _State) -> _State:
        scaled = state.logits / (temperature or 1.0)
        token = _sample(keys, state.step, scaled, greedy=temperature == 0, top_p=top_p, top_k=top_k)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(scaled), token[:, None], axis=1)[:, 0]
        slot = prompt_slots + state.step
        mask = visible | ((jnp.arange(slots) >= prompt_slots) & (jnp.arange(slots) <= slot))[None]
        hidden, cache = model.decode(
            token[:, None], (prompt_lengths + state.step)[:, None], state.cache, slot, mask[:, None]
        )
        return _State(
            step=state.step + 1,
            logits=next_logits(hidden),
            cache=cache,
            done=state.done | (token[:, None] == stop_ids[None]).any(axis=1),
            tokens=state.tokens.at[:, state.step].set(jnp.where(state.done, 0, token)),
            logprobs=state.logprobs.at[:, state.step].set(jnp.where(state.done, 0.0, logprob)),
            lengths=state.lengths + ~state.done,
        )

    start = _State(
        step=jnp.zeros((), jnp.int32),
        logits=per_generation(next_logits(hidden)),
        cache=KVCache(per_generation(cache.k, axis=1), per_generation(cache.v, axis=1)),
        done=jnp.zeros(batch, bool),
        tokens=jnp.zeros((batch, max_tokens), jnp.int32),
        logprobs=jnp.zeros((batch, max_tokens), jnp.float32),
        lengths=jnp.zeros(batch, jnp.int32),
    )
    end = jax.lax.while_loop(lambda state: (state.step < max_tokens) & ~state.done.all(), step, start)
    return end.tokens, end.logprobs, end.lengths


def _sample(
    keys: jax.Array, step: jax.Array, logits: Float[Array, "B V"], *, greedy: bool, top_p: float, top_k: int
) -> Int[Array, "B"]:
    """One token per row, with randomness of the row's own key and the step alone."""
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = jnp.where(_kept(logits, top_p, top_k), logits, -jnp.inf)
    step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
    return jax.vmap(jax.random.categorical)(step_keys, logits).astype(jnp.int32)


def _kept(logits: Float[Array, "B V"], top_p: float, top_k: int) -> Bool[Array, "B V"]:
    """Tokens among the `top_k` likeliest, and among the fewest likeliest whose probabilities reach `top_p` of those."""
    kept = jnp.ones(logits.shape, bool)
    if top_k:
        kept = logits >= jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
    if top_p < 1:
        probabilities = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf))

        # Halve the interval in which the largest threshold lies whose tokens still reach top_p: no sort needed.
        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) / 2
            reached = jnp.where(probabilities >= middle, probabilities, 0.0).sum(axis=-1, keepdims=True) >= top_p
            return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

        low = jnp.zeros((logits.shape[0], 1))
        threshold, _ = jax.lax.fori_loop(0, 32, halve, (low, probabilities.max(axis=-1, keepdims=True)))
        kept &= probabilities >= threshold
    return kept
