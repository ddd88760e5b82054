"""A sampler inside the trainer: the policy's own weights, and slots in which generations take turns."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.qwen3 import Qwen3
from poly_epo_jax.rollouts.embedded.slots import Finished, Request, Slots, capacity
from poly_epo_jax.rollouts.tokens import encode_prompt, response_text
from poly_epo_jax.types import Generation, Group, Params, Problem, Sampling

T = TypeVar("T")


class EmbeddedRollouts:
    """Decodes on the trainer's mesh; each prompt is read once for all of its generations.

    Args:
      model: the policy, possibly abstract: only its configuration is used.
      stop_ids: a generation ends with any of these tokens.
      max_prompt_tokens: a longer prompt is refused.
      max_concurrent: generations decoded at once; the rest waits for whichever is finished first.
    """

    def __init__(
        self,
        model: Qwen3,
        mesh: Mesh,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        max_prompt_tokens: int,
        max_concurrent: int,
    ):
        self.config = model.config
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.stop_ids = np.asarray(stop_ids, np.int32)
        self.max_prompt_tokens = max_prompt_tokens
        self.max_concurrent = max_concurrent
        self._decoding_weights = jax.jit(partial(decoding_weights, model.config))

    async def update_weights(self, params: Params, version: int) -> None:
        """Copies the layers' weights into the layout that decoding reads, in the compute type."""
        with jax.set_mesh(self.mesh):
            self.weights, self.version = self._decoding_weights(params), version

    def close(self) -> None:
        """Nothing is held but arrays."""

    async def generate(
        self, problems: Sequence[Problem], num_generations: int, sampling: Sampling
    ) -> AsyncIterator[Group]:
        """Yields the problems' groups, each once it is complete. The event loop is free meanwhile.

        Raises:
          ValueError: a prompt is empty, or longer than `max_prompt_tokens`.
        """
        if not problems:
            return
        prompts = [encode_prompt(self.tokenizer, problem, self.max_prompt_tokens) for problem in problems]
        requests = [
            Request(prompt, int(seed), sampling.max_tokens)
            for prompt, problem in enumerate(problems)
            for seed in sampling.generation_seeds(problem, num_generations)
        ]
        slots, version = self._slots(prompts, requests, sampling), self.version
        groups: list[list[Finished]] = [[] for _ in problems]
        while not slots.is_done:
            for finished in await _to_the_end(slots.advance):
                place = finished.request // num_generations
                groups[place].append(finished)
                if len(groups[place]) == num_generations:
                    generations = (self._generation(*one[1:], version) for one in sorted(groups[place]))
                    yield Group(problems[place], prompts[place], tuple(generations))

    def _slots(self, prompts: Sequence[np.ndarray], requests: Sequence[Request], sampling: Sampling) -> Slots:
        num_slots, max_prompts = capacity(self.mesh, self.max_concurrent, len(requests), len(requests) // len(prompts))
        return Slots(
            self.config,
            self.weights,
            self.mesh,
            self.stop_ids,
            prompts,
            requests,
            sampling,
            num_slots,
            max_prompts,
            max_length=self.max_prompt_tokens + sampling.max_tokens,
        )

    def _generation(self, token_ids: np.ndarray, logprobs: np.ndarray, version: int) -> Generation:
        stopped = bool(np.isin(token_ids[-1], self.stop_ids))
        text = response_text(self.tokenizer, token_ids, stopped)
        return Generation(token_ids, logprobs, text, "stop" if stopped else "length", version)


async def _to_the_end(function: Callable[[], T]) -> T:
    """Runs it in a thread. Who is cancelled meanwhile still waits for it: nothing goes on behind anyone's back."""
    thread = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        raise
