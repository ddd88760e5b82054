"""Continuous batching: a fixed number of slots decode in parallel, and each that finishes makes room for the next.

The host only refills: it puts waiting generations into free slots, starts a loop on the device that ends once some
slots have finished, and reads those. The cache has one of a few sizes, large enough for the longest active sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import KVCache, whole_weights
from poly_epo_jax.rollouts.embedded import programs
from poly_epo_jax.rollouts.embedded.programs import SlotState
from poly_epo_jax.types import Params, Sampling

CACHE_SIZES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # of the longest sequence allowed; the decoding loop is compiled for each
SHORT_CACHE = 64  # a cache of at most this length has only one size
TURNOVER = 8  # the decoding loop ends once one slot in this many has finished
SHORTEST_PROMPT = 16  # prompts are padded to the next power of two, and at least to this


class Job(NamedTuple):
    """One generation: the index of its prompt, its seed, and its maximum number of tokens."""

    prompt: int
    seed: int
    max_tokens: int


class Finished(NamedTuple):
    """The result of a job, identified by its index among the jobs."""

    job: int
    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]


class Slots:
    """Decodes jobs in order.

    Args:
      weights: `decoding.decoding_weights` of the policy; a whole copy is held for as long as the slots are.
      prompts: the tokens of each prompt.
      num_slots: generations decoded at once; a multiple of the mesh's rows.
      max_prompts: prompts whose keys and values are held at once, apart from the slots; also a multiple of the rows.
      max_length: the longest prompt and response together, over all calls; it determines what is compiled.
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
            self._weights = whole_weights(weights)
        self._prompts, self._jobs, self._sampling = prompts, jobs, sampling
        self._max_prompts = max_prompts
        self._turnover = max(1, num_slots // TURNOVER)
        self._prompt_size = max(SHORTEST_PROMPT, 1 << (max(map(len, prompts)) - 1).bit_length())
        self._sizes = cache_sizes(max_length)
        self._next = 0  # index of the next job
        self._owner = np.full(num_slots, -1)  # the job in each slot
        self._position = np.zeros(num_slots, np.int64)
        self._chunk, self._prefilled = -1, KVCache((), ())  # the prompts now held
        self._state: SlotState | None = None

    @property
    def is_done(self) -> bool:
        return self._next == len(self._jobs) and bool((self._owner < 0).all())

    def advance(self) -> list[Finished]:
        """Refills slots, decodes until some have finished, and empties those. Blocks."""
        with jax.set_mesh(self._mesh):
            state = self._refilled(self._fitted())
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
                tokens, logprobs = jax.device_get(programs.read(state, self._padded(chunk)))
                for row, ids, values in zip(chunk, tokens, logprobs, strict=False):
                    length = lengths[row]
                    finished.append(Finished(int(self._owner[row]), ids[:length].copy(), values[:length].copy()))
        self._owner[rows] = -1
        return sorted(finished)

    def _fitted(self) -> SlotState:
        """The state, with a cache that is long enough for a while but no longer than necessary."""
        starting = self._jobs[self._next : self._next + int((self._owner < 0).sum())]
        lengths = [*self._position[self._owner >= 0], *(len(self._prompts[job.prompt]) for job in starting)]
        longest = max(lengths) + 1
        room = self._sizes[0] // 2
        size = next((size for size in self._sizes if size >= longest + room), self._sizes[-1])
        if self._state is None:
            return programs.start(self._config, len(self._owner), self._sampling.max_tokens, size)
        present = self._state.cache.length
        return programs.resize(self._state, size) if size < present or longest > present else self._state

    def _refilled(self, state: SlotState) -> SlotState:
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
                self._padded(rows, filling=len(self._owner)),
                prompts=self._padded([job.prompt % self._max_prompts for job in jobs]),
                seeds=self._padded([job.seed for job in jobs], dtype=np.uint32),
                tokens=self._padded([int(ids[-1]) for ids in prompts]),
                positions=self._padded([len(ids) - 1 for ids in prompts]),
                limits=self._padded([job.max_tokens for job in jobs]),
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

    def _padded(self, values: Sequence[int] | np.ndarray, filling: int = 0, dtype: type = np.int32) -> np.ndarray:
        """Pads values to the number of slots that are inserted or read at once."""
        padded = np.full(self._turnover, filling, dtype)
        padded[: len(values)] = values
        return padded


def capacity(mesh: Mesh, max_concurrent: int, num_jobs: int, num_generations: int) -> tuple[int, int]:
    """How many slots serve `num_jobs`, and how many prompts are held alongside them; every device gets its share.

    With one generation per prompt, as in later turns, the number of jobs differs from call to call. The slots are then
    a power of two, so that few programs are compiled, and only as many prompts are held as are inserted at once.
    """
    rows = mesh.shape["data"] * mesh.shape["fsdp"]

    def divisible(count: int) -> int:
        return -(-count // rows) * rows

    if num_generations == 1:
        num_jobs, num_generations = 1 << (num_jobs - 1).bit_length(), TURNOVER
    num_slots = divisible(min(max_concurrent, num_jobs))
    return num_slots, divisible(max(1, num_slots // num_generations))


def cache_sizes(max_length: int) -> list[int]:
    """The lengths, in tokens, that a cache may have."""
    shares = CACHE_SIZES if max_length > SHORT_CACHE else CACHE_SIZES[-1:]
    return sorted({min(max_length, -(-int(max_length * share) // 8) * 8) for share in shares})
