"""Our policy behind JetStream's Engine API: the programs are the embedded sampler's, the scheduling is JetStream's.

JetStream's protocol carries only token ids. A request from this process is therefore one negative number, its ticket,
by which the engine finds the prompt, seeds and limit; any other request is a prompt, as a gRPC client sends it. A token
comes back as COLUMNS numbers. JetStream does not return stop tokens, so it is given none: the engine ends a row by
marking what follows as invalid.
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
from poly_epo_jax.rollouts.embedded import programs
from poly_epo_jax.rollouts.embedded.programs import SlotState
from poly_epo_jax.rollouts.embedded.slots import SHORTEST_PROMPT
from poly_epo_jax.rollouts.jetstream import mended as jetstream
from poly_epo_jax.types import Params, Request, Sampling

BEGINNING = -1  # JetStream puts a token before every prompt; ours have none, so it is one that no policy has
FIRST_TICKET = -2  # tickets count down from here
COLUMNS = 3  # per token: its id, the bits of its log-probability, the weight version


@dataclasses.dataclass(frozen=True)
class EngineSize:
    """The sizes fixed when the engine starts: prompts decoded at once, generations of each prompt, and token limits.

    The prompt of a later turn may be longer than `max_prompt_tokens`, but it and its response together take no more
    than `max_prompt_tokens + max_tokens`.
    """

    slots: int
    samples_per_slot: int
    max_prompt_tokens: int
    max_tokens: int


class Prefix(NamedTuple):
    """A request whose prompt has been read; `cache` is None if there was no policy to read it."""

    request: Request
    cache: KVCache | None


@dataclasses.dataclass(frozen=True)
class Policy:
    """What tokens are sampled from: `decoding.whole_weights` and their version; and how to sample."""

    weights: Params
    version: int
    sampling: Sampling


class Qwen3Engine(jetstream.engine_api.Engine):
    """A slot is `samples_per_slot` neighbouring rows of one decoding state.

    `policy` is what JetStream calls params. It may be replaced while nothing is decoded; while it is None, nothing
    touches the weights and every row ends with the next step.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, stop_ids: Sequence[int], size: EngineSize):
        self.size = size
        self._config, self._mesh = config, mesh
        self._stop_ids = np.asarray(stop_ids, np.int32)
        self._shares = mesh.shape["data"] * mesh.shape["fsdp"]  # the number of rows must be a multiple of this
        self._rows = -(-size.slots * size.samples_per_slot // self._shares) * self._shares
        self._policy: Policy | None = None
        self._requests: dict[int, Request] = {}
        self._tickets = itertools.count(FIRST_TICKET, -1)
        # JetStream's threads take turns on the devices: multi-device programs must start in the same order everywhere.
        self._turn = threading.Lock()

    @property
    def policy(self) -> Policy | None:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        """Returns once nothing more is started on the devices with the previous policy."""
        with self._turn:
            self._policy = policy

    def ticket(self, request: Request) -> int:
        """A single-use token id that stands for a request with at most `samples_per_slot` seeds."""
        ticket = next(self._tickets)
        self._requests[ticket] = request
        return ticket

    def check(self, token_ids: Sequence[int]) -> None:
        """Refuses what `prefill` cannot read.

        Raises:
          ValueError: the prompt is empty, too long, or not of this vocabulary.
        """
        if len(token_ids) == 1 and token_ids[0] in self._requests:
            return
        if not 0 < len(token_ids) <= self.size.max_prompt_tokens:
            raise ValueError(f"The prompt has {len(token_ids)} tokens, not 1 to {self.size.max_prompt_tokens}.")
        if not all(0 <= token < self._config.vocab_size for token in token_ids):
            raise ValueError(f"The prompt has tokens that are not from 0 to {self._config.vocab_size - 1}.")

    def prefill(
        self,
        *,
        params: None,
        existing_prefix: Any = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
    ) -> Prefix:
        """Reads the prompt that a ticket stands for, or the given prompt."""
        request = self._request(np.asarray(padded_tokens)[:true_length])
        prompt = request.prompt_ids
        length = max(SHORTEST_PROMPT, 1 << (len(prompt) - 1).bit_length())
        tokens = np.zeros((self._shares, length), np.int32)
        valid = np.zeros(tokens.shape, bool)
        tokens[0, : len(prompt)], valid[0, : len(prompt)] = prompt, True
        with self._turn, jax.set_mesh(self._mesh):
            if self._policy is None:
                return Prefix(request, None)
            return Prefix(request, programs.prefill(self._config, self._policy.weights, tokens, valid))

    def _request(self, token_ids: Int[np.ndarray, " L"]) -> Request:
        token_ids = token_ids[int(token_ids[0] == BEGINNING) :]
        if token_ids[0] <= FIRST_TICKET:
            return self._requests.pop(int(token_ids[0]))
        seeds = np.arange(self.size.samples_per_slot, dtype=np.uint32)
        return Request("", token_ids.astype(np.int32), seeds, self.size.max_tokens)

    def insert(self, prefix: Prefix, decode_state: SlotState, slot: int) -> SlotState:
        """Copies the prompt into one row of the slot for each of its seeds."""
        if prefix.cache is None:
            return decode_state
        request, samples = prefix.request, self.size.samples_per_slot
        prompt, seeds = request.prompt_ids, request.seeds
        rows = np.full(samples, self._rows, np.int32)  # out of bounds: not written
        rows[: len(seeds)] = slot * samples + np.arange(len(seeds))
        with self._turn, jax.set_mesh(self._mesh):
            return programs.insert(
                decode_state,
                prefix.cache,
                rows,
                prompts=np.zeros(samples, np.int32),
                seeds=np.resize(seeds, samples),
                tokens=np.full(samples, prompt[-1], np.int32),
                positions=np.full(samples, len(prompt) - 1, np.int32),
                limits=np.full(samples, request.max_tokens, np.int32),
            )

    def generate(self, params: None, decode_state: SlotState) -> tuple[SlotState, Any]:
        """Decodes one token in every row that is not done."""
        with self._turn, jax.set_mesh(self._mesh):
            if self._policy is None:
                return _ended(decode_state), self._result(np.zeros((self._rows, 2 * COLUMNS + 1), np.int32))
            sampling = self._policy.sampling
            state, data = _step(
                self._config,
                self._policy.weights,
                decode_state,
                self._stop_ids,
                self._policy.version,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            )
        return state, self._result(data)

    def _result(self, data: jax.Array | np.ndarray) -> Any:
        tokens, valid, length = (0, COLUMNS), (COLUMNS, 2 * COLUMNS), (2 * COLUMNS, 2 * COLUMNS + 1)
        return jetstream.engine_api.ResultTokens(data, tokens, valid, length, self.size.samples_per_slot)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> SlotState:
        length = self.size.max_prompt_tokens + self.size.max_tokens
        with self._turn, jax.set_mesh(self._mesh):
            return programs.start(self._config, self._rows, self.size.max_tokens, length)

    def load_params(self, *args: Any, **kwargs: Any) -> None:
        """Returns None: the driver would hold on to the weights for ever."""

    def get_prefix_destination_sharding(self) -> None:
        """Returns None: this engine decodes the prompts that it reads."""

    def get_tokenizer(self) -> None:
        """Returns None: see `build_tokenizer`."""

    def build_tokenizer(self, metadata: None) -> Any:
        return _TokenIds()

    @property
    def max_concurrent_decodes(self) -> int:
        return self.size.slots

    @property
    def samples_per_slot(self) -> int:
        return self.size.samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        """The one of JetStream's own sizes that holds the longest prompt and the token before it."""
        return min(32768, max(16, 1 << self.size.max_prompt_tokens.bit_length()))

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None


class _TokenIds(jetstream.tokenizer_api.Tokenizer):
    """A tokenizer that does not handle text."""

    bos_id, eos_id, pad_id = BEGINNING, BEGINNING, 0
    stop_tokens = frozenset()

    def encode(self, s: str, **kwargs: Any) -> Any:
        raise NotImplementedError("Requests are token ids.")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        raise NotImplementedError("Responses are token ids.")


def unpack(columns: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"], set[int]]:
    """Token ids, log-probabilities and weight versions of a generation's tokens, each COLUMNS numbers."""
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
    """The state with one more token in every active row, and JetStream's rows: token, COLUMNS times valid, length."""
    valid = state.active[:, None].astype(jnp.int32)
    state = programs.next_token(config, weights, state, stop_ids, **sampling)
    newest = jnp.maximum(state.length - 1, 0)[:, None]
    logprob = jnp.take_along_axis(state.logprobs, newest, axis=1)
    bits = jax.lax.bitcast_convert_type(logprob, jnp.int32)
    versions = jnp.full_like(bits, version)
    columns = [state.token[:, None], bits, versions, *[valid] * COLUMNS, state.length[:, None]]
    return programs.on_rows(state), jnp.concatenate(columns, axis=1)


@partial(jax.jit, donate_argnames="state")
def _ended(state: SlotState) -> SlotState:
    return programs.on_rows(state._replace(active=jnp.zeros_like(state.active)))
