"""Continuous batching: a fixed number of slots decode in parallel, and the next generation reuses a finished slot.

The host inserts waiting generations into free slots, runs a decoding loop on the devices until some slots have
finished, and reads their tokens. The cache has one of a few sizes, so that attention does not read a full-length cache
while all active sequences are short.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import KVCache, gather_weights_over_fsdp
from poly_epo_jax.parallel.mesh import row_shards
from poly_epo_jax.rollouts.embedded import programs
from poly_epo_jax.rollouts.embedded.token_sampling import INDEPENDENT
from poly_epo_jax.types import Params, Sampling

# Cache lengths as fractions of the maximum sequence length. The decoding loop is compiled for each length in use.
CACHE_SIZES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
SHORT_CACHE = 64  # Caches of at most this length, in tokens, have a single size.
TURNOVER = 8  # The decoding loop returns when 1 / TURNOVER of all slots have finished.
MIN_PADDED_PROMPT = 16  # Prompts are padded to powers of two that are at least this long, in tokens.


class Job(NamedTuple):
    """One generation.

    Attributes:
      prompt: Index of the prompt.
      seed: Seed of the generation.
      max_tokens: Maximum number of response tokens.
      lattice: Point of the generation and spacing of the points of its group, see `group_lattice`.
    """

    prompt: int
    seed: int
    max_tokens: int
    lattice: Sequence[float] = INDEPENDENT


class Finished(NamedTuple):
    """The result of a job.

    Attributes:
      job: Index of the job.
      token_ids: Generated tokens [T].
      logprobs: Log-probabilities [T] of these tokens.
    """

    job: int
    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]


class Slots:
    """Decodes a list of jobs with continuous batching. Jobs are started in order.

    Args:
      config: Configuration of the model.
      weights: Weights from `decoding.decoding_weights`. A copy that is replicated over `fsdp` is kept until the slots
        are deleted.
      mesh: Mesh of the policy. Slots are sharded over `ROWS`.
      stop_ids: Token ids [S] that end a generation.
      prompts: Tokens [L] of each prompt.
      jobs: Generations to decode, sorted by the index of their prompt.
      sampling: Sampling parameters.
      num_slots: Number of generations that are decoded at once. Must be a multiple of `row_shards`.
      max_prompts: Number of prompts that are prefilled at once. Their cache is stored in addition to the cache of the
        slots. Must be a multiple of `row_shards`.
      max_length: Maximum number of tokens of a prompt and its response. It determines the shapes of the compiled
        programs, so it should be the same in all calls.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Params,
        mesh: Mesh,
        stop_ids: Int[np.ndarray, " S"],
        prompts: Sequence[Int[np.ndarray, " L"]],
        jobs: Sequence[Job],
        sampling: Sampling,
        num_slots: int,
        max_prompts: int,
        max_length: int,
    ):
        self._config, self._mesh, self._stop_ids = config, mesh, stop_ids
        with jax.set_mesh(mesh):
            self._weights = gather_weights_over_fsdp(weights)
        self._prompts, self._jobs, self._sampling = prompts, jobs, sampling
        self._max_prompts = max_prompts
        self._turnover = max(1, num_slots // TURNOVER)
        self._prompt_size = max(MIN_PADDED_PROMPT, 1 << (max(map(len, prompts)) - 1).bit_length())
        self._sizes = cache_sizes(max_length)
        self._next = 0  # Index of the next job.
        self._owner = np.full(num_slots, -1)  # Index of the job in each slot, or -1 if the slot is free.
        self._position = np.zeros(num_slots, np.int64)
        self._chunk, self._prefilled = -1, KVCache((), ())  # Index of the prefilled chunk of prompts, and its cache.
        self._state: programs.SlotState | None = None

    @property
    def is_done(self) -> bool:
        """True if all jobs have finished."""
        return self._next == len(self._jobs) and bool((self._owner < 0).all())

    def advance(self) -> list[Finished]:
        """Fills free slots, decodes until some slots have finished, and returns their results in job order.

        Blocks until the devices have finished.
        """
        with jax.set_mesh(self._mesh):
            state = self._refill(self._fit_cache())
            state, status = programs.decode(
                self._config,
                self._weights,
                state,
                self._stop_ids,
                turnover=self._turnover,
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                top_k=self._sampling.top_k,
            )
            self._state = state
            active, lengths, self._position = np.asarray(status)
            rows = np.flatnonzero((self._owner >= 0) & (active == 0))
            finished = []
            for start in range(0, len(rows), self._turnover):
                chunk = rows[start : start + self._turnover]
                tokens, logprobs = jax.device_get(programs.read(state, self._pad(chunk)))
                for row, ids, values in zip(chunk, tokens, logprobs, strict=False):
                    length = lengths[row]
                    finished.append(Finished(int(self._owner[row]), ids[:length].copy(), values[:length].copy()))
        self._owner[rows] = -1
        return sorted(finished)

    def _fit_cache(self) -> programs.SlotState:
        """Returns the state with a cache that is long enough for all active and starting sequences.

        The cache shrinks if a smaller size suffices with headroom, and grows only if a sequence no longer fits. A
        resized cache has headroom, unless it has the maximum size.
        """
        starting = self._jobs[self._next : self._next + int((self._owner < 0).sum())]
        longest = max([*self._position[self._owner >= 0], *(len(self._prompts[job.prompt]) for job in starting)]) + 1
        headroom = self._sizes[0] // 2
        size = next((size for size in self._sizes if size >= longest + headroom), self._sizes[-1])
        if self._state is None:
            return programs.start(self._config, len(self._owner), self._sampling.max_tokens, size)
        present = self._state.cache.length
        return programs.resize(self._state, size) if size < present or longest > present else self._state

    def _refill(self, state: programs.SlotState) -> programs.SlotState:
        free = np.flatnonzero(self._owner < 0)
        while len(free) and self._next < len(self._jobs):
            chunk = self._jobs[self._next].prompt // self._max_prompts
            if chunk != self._chunk:
                self._chunk, self._prefilled = chunk, self._prefill(chunk)
            end = self._next + min(len(free), self._turnover)
            jobs = [job for job in self._jobs[self._next : end] if job.prompt // self._max_prompts == chunk]
            rows, free = free[: len(jobs)], free[len(jobs) :]
            prompts = [self._prompts[job.prompt] for job in jobs]
            state = programs.insert(
                state,
                self._prefilled,
                self._pad(rows, filling=len(self._owner)),
                prompts=self._pad([job.prompt % self._max_prompts for job in jobs]),
                seeds=self._pad([job.seed for job in jobs], dtype=np.uint32),
                lattice=self._pad([job.lattice for job in jobs], dtype=np.float32),
                tokens=self._pad([int(ids[-1]) for ids in prompts]),
                positions=self._pad([len(ids) - 1 for ids in prompts]),
                limits=self._pad([job.max_tokens for job in jobs]),
            )
            self._owner[rows] = np.arange(self._next, self._next + len(jobs))
            self._next += len(jobs)
        return state

    def _prefill(self, chunk: int) -> KVCache:
        prompts = self._prompts[chunk * self._max_prompts : (chunk + 1) * self._max_prompts]
        tokens = np.zeros((self._max_prompts, self._prompt_size), np.int32)
        valid = np.zeros(tokens.shape, bool)
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)], valid[row, : len(ids)] = ids, True
        return programs.prefill(self._config, self._weights, tokens, valid)

    def _pad(self, values: Sequence[Any] | np.ndarray, filling: int = 0, dtype: type = np.int32) -> np.ndarray:
        """Pads values to the number of slots that are inserted or read per call."""
        padded = np.full((self._turnover, *np.shape(values)[1:]), filling, dtype)
        padded[: len(values)] = values
        return padded


def capacity(mesh: Mesh, max_concurrent: int, num_jobs: int, num_generations: int) -> tuple[int, int]:
    """Returns the number of slots, and of prompts that are prefilled at once, both multiples of `row_shards`.

    With one generation per prompt, as in later turns, the number of jobs varies between calls. It is then rounded up to
    a power of two, so that few programs are compiled, and one prompt is prefilled for every TURNOVER slots.

    Args:
      mesh: Mesh of the sampler.
      max_concurrent: Maximum number of generations that are decoded at once, rounded up to a multiple of `row_shards`.
      num_jobs: Number of generations.
      num_generations: Number of generations per prompt.

    Returns:
      Arguments `num_slots` and `max_prompts` of `Slots`.
    """
    rows = row_shards(mesh.shape)

    def divisible(count: int) -> int:
        return -(-count // rows) * rows

    if num_generations == 1:
        num_jobs, num_generations = 1 << (num_jobs - 1).bit_length(), TURNOVER
    num_slots = divisible(min(max_concurrent, num_jobs))
    return num_slots, divisible(max(1, num_slots // num_generations))


def cache_sizes(max_length: int) -> list[int]:
    """Returns the cache lengths in tokens, in ascending order, for sequences of at most `max_length` tokens."""
    fractions = CACHE_SIZES if max_length > SHORT_CACHE else CACHE_SIZES[-1:]
    return sorted({min(max_length, -(-int(max_length * fraction) // 8) * 8) for fraction in fractions})
