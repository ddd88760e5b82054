"""Sampler that generates with the trainer's weights on the trainer's devices, with continuous batching."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.parallel.compiler_options import Jit
from poly_epo_jax.rollouts.embedded.slots import Job, Slots, capacity
from poly_epo_jax.rollouts.embedded.token_sampling import INDEPENDENT, group_lattice
from poly_epo_jax.system.run_to_completion import run_to_completion
from poly_epo_jax.types import Completion, Params, Request, Sampling


class EmbeddedSampler:
    """Decodes on the trainer's mesh. Each prompt is prefilled once for all of its generations.

    Args:
      model: The policy. It may be abstract, because only its configuration is used.
      mesh: Mesh of the trainer.
      stop_ids: Token ids that end a generation.
      max_prompt_tokens: Maximum number of prompt tokens of a first turn. The prompt of a later turn includes the
        previous turns, but a sequence is never longer than `max_prompt_tokens` plus the response limit.
      max_concurrent: Maximum number of generations that are decoded at once, rounded up to a multiple of `row_shards`.
        Other generations wait for a free slot.
      full_batch: Number of generations of a batch, if the size of calls varies. The number of slots of a smaller call
        is then halved from this number, so that few programs are compiled. 0 gives each call its own number of slots.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        stop_ids: Sequence[int],
        max_prompt_tokens: int,
        max_concurrent: int,
        full_batch: int = 0,
    ):
        self.config = model.config
        self.mesh = mesh
        self.stop_ids = np.asarray(stop_ids, np.int32)
        self.max_prompt_tokens = max_prompt_tokens
        self.max_concurrent, self.full_batch = max_concurrent, full_batch
        self._params: Params | None = None
        self._decoding_weights = Jit(partial(decoding_weights, model.config))

    async def push_weights(self, params: Params, version: int) -> None:
        """Stores references to the trainer's arrays.

        Args:
          params: All weights of the policy. They must not be donated until the last generation with them has finished.
          version: Number of training steps that produced the weights.
        """
        self._params = params
        self.version = version

    @property
    def weights(self) -> Params:
        """A copy with the shardings and dtype for decoding. It exists during decoding, but not during the update."""
        with jax.set_mesh(self.mesh):
            return self._decoding_weights(self._params)

    def close(self) -> None:
        """Deletes the references to the trainer's arrays."""
        self._params = None

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yields each completion as soon as it has finished.

        Decoding runs in a thread and does not block the event loop.

        Args:
          requests: Requests with the same number of seeds each.
          sampling: Sampling parameters.
        """
        origins = [(place, index) for place, request in enumerate(requests) for index in range(len(request.seeds))]
        slots, version = self._slots(requests, sampling), self.version
        while not slots.is_done:
            for finished in await run_to_completion(asyncio.to_thread(slots.advance)):
                reason = "stop" if finished.token_ids[-1] in self.stop_ids else "length"
                versions = np.full(len(finished.token_ids), version, np.int32)
                yield Completion(*origins[finished.job], finished.token_ids, finished.logprobs, reason, versions)

    def _slots(self, requests: Sequence[Request], sampling: Sampling) -> Slots:
        def points(request: Request) -> Sequence[Sequence[float]]:
            return group_lattice(request.seeds).tolist() if sampling.correlated else [INDEPENDENT] * len(request.seeds)

        jobs = [
            Job(prompt, int(seed), request.max_tokens, point)
            for prompt, request in enumerate(requests)
            for seed, point in zip(request.seeds, points(request), strict=True)
        ]
        size = self.full_batch
        while len(jobs) <= size // 2:
            size //= 2
        num_slots, max_prompts = capacity(
            self.mesh, self.max_concurrent, max(size, len(jobs)), len(jobs) // len(requests)
        )
        return Slots(
            self.config,
            self.weights,
            self.mesh,
            self.stop_ids,
            [request.prompt_ids for request in requests],
            jobs,
            sampling,
            num_slots,
            max_prompts,
            max_length=self.max_prompt_tokens + sampling.max_tokens,
        )
