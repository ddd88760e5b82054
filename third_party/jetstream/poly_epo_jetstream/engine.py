"""Implements the Engine API of JetStream with the compiled programs of the embedded sampler.

The protocol of JetStream only transfers token ids. A request of this process is therefore a single negative token id,
its ticket, with which the engine looks up the prompt, seeds and token limit. All other requests, such as those of gRPC
clients, consist of prompt tokens. Each generated token is returned as COLUMNS numbers. JetStream removes stop tokens
from its results, so it is not given any. Instead, the engine ends a row by marking all further tokens as invalid.
"""

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import KVCache
from poly_epo_jax.parallel.mesh import row_shards
from poly_epo_jax.rollouts.embedded import programs
from poly_epo_jax.rollouts.embedded.programs import SlotState
from poly_epo_jax.rollouts.embedded.slots import MIN_PADDED_PROMPT
from poly_epo_jax.rollouts.embedded.token_sampling import INDEPENDENT
from poly_epo_jax.types import Params, Request, Sampling
from poly_epo_jetstream import patched as jetstream

BEGINNING = -1  # Token that JetStream prepends to every prompt. It is not in any vocabulary, and is removed.
FIRST_TICKET = -2  # Tickets are numbered downwards from this value.
COLUMNS = 3  # Numbers per token: its id, the bits of its log-probability, and the weight version.


@dataclasses.dataclass(frozen=True)
class EngineSize:
    """Sizes that are fixed when the engine is created.

    The prompt of a later turn may be longer than `max_prompt_tokens`, but prompt and response together have at most
    `max_prompt_tokens + max_tokens` tokens.

    Attributes:
      slots: Number of prompts that are decoded at once.
      samples_per_slot: Number of generations per prompt in a slot.
      max_prompt_tokens: Maximum number of prompt tokens.
      max_tokens: Maximum number of response tokens.
    """

    slots: int
    samples_per_slot: int
    max_prompt_tokens: int
    max_tokens: int


class Prefix(NamedTuple):
    """A request with its prefilled prompt. `cache` is None if the engine had no weights to prefill with."""

    request: Request
    cache: KVCache | None


@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Weights and sampling parameters of the generations in progress.

    Attributes:
      weights: Weights from `decoding.gather_weights_over_fsdp`.
      version: Number of training steps that produced the weights.
      sampling: Sampling parameters.
    """

    weights: Params
    version: int
    sampling: Sampling


class Qwen3Engine(jetstream.engine_api.Engine):
    """JetStream engine. A slot consists of `samples_per_slot` adjacent rows of the decoding state.

    `sampling_state` replaces the params of JetStream. It may be set to None at any time, but to another state only
    while nothing is decoded. While it is None, no program reads weights, and every row ends with the next step.

    Args:
      config: Configuration of the model.
      mesh: Mesh of the policy.
      stop_ids: Token ids that end a generation.
      size: Sizes of the decoding state.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, stop_ids: Sequence[int], size: EngineSize):
        self.size = size
        self._config, self._mesh = config, mesh
        self._stop_ids = np.asarray(stop_ids, np.int32)
        self._shares = row_shards(mesh.shape)  # The number of rows must be a multiple of this.
        self._rows = -(-size.slots * size.samples_per_slot // self._shares) * self._shares
        self._sampling_state: SamplingState | None = None
        self._requests: dict[int, Request] = {}
        self._tickets = itertools.count(FIRST_TICKET, -1)
        # Serializes the threads of JetStream, because all devices must launch multi-device programs in the same order.
        self._turn = threading.Lock()

    @property
    def sampling_state(self) -> SamplingState | None:
        """Weights and sampling parameters of the generations in progress, or None."""
        return self._sampling_state

    @sampling_state.setter
    def sampling_state(self, sampling_state: SamplingState | None) -> None:
        """Sets the state. Afterwards, no program is launched with the previous weights."""
        with self._turn:
            self._sampling_state = sampling_state

    def ticket(self, request: Request) -> int:
        """Returns a single-use token id that represents a request with at most `samples_per_slot` seeds."""
        ticket = next(self._tickets)
        self._requests[ticket] = request
        return ticket

    def check(self, token_ids: Sequence[int]) -> None:
        """Validates the token ids of a request.

        Raises:
          ValueError: If they are neither a valid ticket nor a prompt of 1 to `max_prompt_tokens` tokens of the
            vocabulary.
        """
        if len(token_ids) == 1 and token_ids[0] in self._requests:
            return
        if not 0 < len(token_ids) <= self.size.max_prompt_tokens:
            raise ValueError(
                f"The prompt has {len(token_ids)} tokens, but must have 1 to {self.size.max_prompt_tokens}."
            )
        if not all(0 <= token < self._config.vocab_size for token in token_ids):
            raise ValueError(f"The prompt has token ids outside the range 0 to {self._config.vocab_size - 1}.")

    def prefill(
        self,
        *,
        params: None,
        existing_prefix: Any = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
    ) -> Prefix:
        """Prefills the prompt of a request. `params` and `existing_prefix` are part of the JetStream API and not used.

        Args:
          padded_tokens: Token ids of the request, with padding: a ticket or a prompt.
          true_length: Number of token ids without padding.

        Returns:
          The request with its prefilled prompt.
        """
        request = self._request(np.asarray(padded_tokens)[:true_length])
        prompt = request.prompt_ids
        length = max(MIN_PADDED_PROMPT, 1 << (len(prompt) - 1).bit_length())
        tokens = np.zeros((self._shares, length), np.int32)
        valid = np.zeros(tokens.shape, bool)
        tokens[0, : len(prompt)], valid[0, : len(prompt)] = prompt, True
        with self._turn, jax.set_mesh(self._mesh):
            if self._sampling_state is None:
                return Prefix(request, None)
            return Prefix(request, programs.prefill(self._config, self._sampling_state.weights, tokens, valid))

    def _request(self, token_ids: Int[np.ndarray, " L"]) -> Request:
        token_ids = token_ids[int(token_ids[0] == BEGINNING) :]
        if token_ids[0] <= FIRST_TICKET:
            return self._requests.pop(int(token_ids[0]))
        seeds = np.arange(self.size.samples_per_slot, dtype=np.uint32)
        return Request("", token_ids.astype(np.int32), seeds, self.size.max_tokens)

    def insert(self, prefix: Prefix, decode_state: SlotState, slot: int) -> SlotState:
        """Inserts a prefilled prompt into a slot, in one row for each seed of the request.

        Args:
          prefix: The prefilled request.
          decode_state: The decoding state. Its buffers are donated.
          slot: Index of the slot.

        Returns:
          The updated decoding state.
        """
        if prefix.cache is None:
            return decode_state
        request, samples = prefix.request, self.size.samples_per_slot
        prompt, seeds = request.prompt_ids, request.seeds
        rows = np.full(samples, self._rows, np.int32)  # Out-of-bounds writes are dropped.
        rows[: len(seeds)] = slot * samples + np.arange(len(seeds))
        with self._turn, jax.set_mesh(self._mesh):
            return programs.insert(
                decode_state,
                prefix.cache,
                rows,
                prompts=np.zeros(samples, np.int32),
                seeds=np.resize(seeds, samples),
                lattice=np.tile(np.asarray(INDEPENDENT, np.float32), (samples, 1)),
                tokens=np.full(samples, prompt[-1], np.int32),
                positions=np.full(samples, len(prompt) - 1, np.int32),
                limits=np.full(samples, request.max_tokens, np.int32),
            )

    def generate(self, params: None, decode_state: SlotState) -> tuple[SlotState, Any]:
        """Generates one token in every active row.

        Args:
          params: Part of the JetStream API. Not used.
          decode_state: The decoding state. Its buffers are donated.

        Returns:
          The updated decoding state and the generated tokens as `ResultTokens`.
        """
        with self._turn, jax.set_mesh(self._mesh):
            if self._sampling_state is None:
                return _ended(decode_state), self._result(np.zeros((self._rows, 2 * COLUMNS + 1), np.int32))
            sampling = self._sampling_state.sampling
            state, data = _step(
                self._config,
                self._sampling_state.weights,
                decode_state,
                self._stop_ids,
                self._sampling_state.version,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            )
        return state, self._result(data)

    def _result(self, data: jax.Array | np.ndarray) -> Any:
        tokens, valid, length = (0, COLUMNS), (COLUMNS, 2 * COLUMNS), (2 * COLUMNS, 2 * COLUMNS + 1)
        return jetstream.engine_api.ResultTokens(data, tokens, valid, length, self.size.samples_per_slot)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> SlotState:
        """Creates a decoding state without active rows, with caches of full length."""
        length = self.size.max_prompt_tokens + self.size.max_tokens
        with self._turn, jax.set_mesh(self._mesh):
            return programs.start(self._config, self._rows, self.size.max_tokens, length)

    def load_params(self, *args: Any, **kwargs: Any) -> None:
        """Returns None, because the driver would keep references to the weights forever."""

    def get_prefix_destination_sharding(self) -> None:
        """Returns None, because the same engine prefills and decodes."""

    def get_tokenizer(self) -> None:
        """Returns None. `build_tokenizer` does not require metadata."""

    def build_tokenizer(self, metadata: None) -> Any:
        """Returns a tokenizer that accepts token ids only."""
        return _TokenIds()

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self.size.slots

    @property
    def samples_per_slot(self) -> int:
        """Number of generations per slot."""
        return self.size.samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        """Smallest padded length of JetStream that fits the longest prompt and its first token, `BEGINNING`."""
        return min(32768, max(16, 1 << self.size.max_prompt_tokens.bit_length()))

    @property
    def mesh(self) -> Mesh:
        """Mesh of the engine."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """None, because colocated CPUs are not used."""
        return None


class _TokenIds(jetstream.tokenizer_api.Tokenizer):
    """Tokenizer for requests and responses of token ids. Text is not supported."""

    bos_id, eos_id, pad_id = BEGINNING, BEGINNING, 0
    stop_tokens = frozenset()

    def encode(self, s: str, **kwargs: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError("Text requests are not supported; send token ids.")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Raises NotImplementedError."""
        raise NotImplementedError("Text responses are not supported; request token ids.")


def unpack(columns: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"], set[int]]:
    """Unpacks the numbers that `Qwen3Engine` returns for T tokens.

    Args:
      columns: COLUMNS numbers for each token.

    Returns:
      Token ids [T], log-probabilities [T], and the set of weight versions.
    """
    numbers = np.asarray(columns, np.int32).reshape(-1, COLUMNS)
    token_ids, bits, versions = numbers.T
    return token_ids.copy(), bits.copy().view(np.float32), set(versions.tolist())


@partial(jax.jit, static_argnames=("config", "temperature", "top_p", "top_k"), donate_argnames="state")
def _step(
    config: ModelConfig,
    weights: Params,
    state: SlotState,
    stop_ids: Int[Array, " S"],
    version: int | Int[Array, ""],
    **sampling: Any,
) -> tuple[SlotState, Int[Array, "B 7"]]:
    """Generates one token in every active row.

    Returns:
      The updated state, and an int32 array [B, 2 * COLUMNS + 1] for JetStream: the COLUMNS numbers of each token, their
      validity (COLUMNS equal values), and the response length.
    """
    valid = state.active[:, None].astype(jnp.int32)
    state = programs.next_token(config, weights, state, stop_ids, **sampling)
    newest = jnp.maximum(state.length - 1, 0)[:, None]
    logprob = jnp.take_along_axis(state.logprobs, newest, axis=1)
    bits = jax.lax.bitcast_convert_type(logprob, jnp.int32)
    versions = jnp.full_like(bits, version)
    columns = [state.token[:, None], bits, versions, *[valid] * COLUMNS, state.length[:, None]]
    return programs.constrain_rows(state), jnp.concatenate(columns, axis=1)


@partial(jax.jit, donate_argnames="state")
def _ended(state: SlotState) -> SlotState:
    return programs.constrain_rows(state._replace(active=jnp.zeros_like(state.active)))
