"""Sampler that generates in the trainer's process with the queues, slots and continuous batching of JetStream.

The threads of JetStream, and a thread with an event loop that reads their results, run alongside the trainer. A prompt
is prefilled once for all generations of its slot.
"""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from poly_epo_jax.model.decoding import decoding_weights, gather_weights_over_fsdp
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.rollouts.completion_check import completion_flaw
from poly_epo_jax.system.run_to_completion import run_to_completion
from poly_epo_jax.types import Completion, Params, Request, Sampling
from poly_epo_jetstream import patched as jetstream
from poly_epo_jetstream.engine import EngineSize, Qwen3Engine, SamplingState, unpack

Columns = list[list[int]]
"""Result of JetStream for one generation: COLUMNS numbers for each token."""


class JetStreamSampler:
    """Decodes on the trainer's mesh with JetStream.

    Only one call of `sample` generates at a time. Further calls and weight pushes wait until it has finished.

    Args:
      model: The policy. It may be abstract, because only its configuration is used.
      mesh: Mesh of the trainer.
      stop_ids: Token ids that end a generation.
      size: Sizes of the engine. A prompt with more than `samples_per_slot` generations uses several slots.
    """

    def __init__(self, model: Transformer, mesh: Mesh, stop_ids: Sequence[int], size: EngineSize):
        self._mesh, self._stop_ids, self._size = mesh, tuple(stop_ids), size
        self._vocab_size = model.config.vocab_size
        self._decoding_weights = jax.jit(partial(decoding_weights, model.config))
        self._weights: Params | None = None
        self._engine = Qwen3Engine(model.config, mesh, stop_ids, size)
        # Interleaved mode: the same engine prefills and decodes.
        self._driver = jetstream.orchestrator.Driver(
            prefill_engines=[self._engine],
            generate_engines=[self._engine],
            prefill_params=[None],
            generate_params=[None],
            interleaved_mode=True,
            jax_padding=False,
        )
        self._orchestrator = jetstream.orchestrator.LLMOrchestrator(driver=self._driver)
        # JetStream sends tokens to an event loop and fails if the loop has been closed. The trainer may close its event
        # loop at any time, so the sampler runs a separate one.
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()  # Used on this loop only. Its holder owns all slots.
        self._thread = threading.Thread(target=self._loop.run_forever, name="jetstream-rollouts", daemon=True)
        self._thread.start()

    async def push_weights(self, params: Params, version: int) -> None:
        """Waits for the generations in progress, and copies the weights with the shardings and dtype for decoding.

        Args:
          params: All weights of the policy.
          version: Number of training steps that produced the weights.
        """
        await self._on_loop(self._swap(params, version))

    async def _swap(self, params: Params, version: int) -> None:
        async with self._turn:
            with jax.set_mesh(self._mesh):
                self._weights, self._version = self._decoding_weights(params), version

    def close(self) -> None:
        """Waits for the generations in progress, stops the threads, and deletes the weights."""
        asyncio.run_coroutine_threadsafe(self._idle(), self._loop).result()
        self._driver.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._weights = None

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yields the completions of a slot as soon as all of them have finished.

        A slot has up to `samples_per_slot` completions of one request. Decoding runs in threads and does not block the
        event loop.

        Args:
          requests: Requests to complete.
          sampling: Sampling parameters.

        Raises:
          ValueError: If `sampling.max_tokens` exceeds the response limit of the engine.
          RuntimeError: If JetStream or the engine has failed, a completion is invalid, or no weights have been pushed.
        """
        if self._weights is None:
            raise RuntimeError("No weights have been pushed to the sampler; call push_weights first.")
        if sampling.max_tokens > self._size.max_tokens:
            raise ValueError(
                f"Responses of {sampling.max_tokens} tokens do not fit into the cache of JetStream, which was created "
                f"for sampling.max_tokens={self._size.max_tokens}; raise sampling.max_tokens."
            )
        finished: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        running = asyncio.run_coroutine_threadsafe(self._decode(requests, sampling, finished), self._loop)
        try:
            for _ in range(sum(len(request.seeds) for request in requests)):
                completion = await self._on_loop(finished.get())
                if isinstance(completion, Exception):
                    raise completion
                yield completion
        finally:
            running.cancel()  # Has no effect if it has finished.
            await run_to_completion(self._on_loop(self._idle()))

    async def _on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _idle(self) -> None:
        """Waits until all slots are free."""
        async with self._turn:
            pass

    async def _decode(self, requests: Sequence[Request], sampling: Sampling, finished: asyncio.Queue) -> None:
        size = self._size.samples_per_slot
        async with self._turn:
            assert self._weights is not None
            with jax.set_mesh(self._mesh):
                self._engine.sampling_state = SamplingState(
                    gather_weights_over_fsdp(self._weights), self._version, sampling
                )
            slots = [
                asyncio.create_task(self._slot(place, request, start, finished))
                for place, request in enumerate(requests)
                for start in range(0, len(request.seeds), size)
            ]
            try:
                await asyncio.wait(slots)
            finally:
                # Generations that are still in progress end with the next step. Then no program reads the weights.
                self._engine.sampling_state = None
                await asyncio.wait(slots)

    async def _slot(self, place: int, request: Request, start: int, finished: asyncio.Queue) -> None:
        """Decodes the seeds of one slot, beginning with `start`. Puts the completions, or an error, into `finished`."""
        seeds = request.seeds[start : start + self._size.samples_per_slot]
        try:
            samples = await self._columns(dataclasses.replace(request, seeds=seeds))
            completions = [self._completion(request, place, start + i, columns) for i, columns in enumerate(samples)]
        except Exception as error:
            completions = [error]
        for completion in completions:
            finished.put_nowait(completion)

    async def _columns(self, request: Request) -> list[Columns]:
        """Collects the results of a slot's generations token by token."""
        ids = jetstream.jetstream_pb2.DecodeRequest.TokenContent(token_ids=[self._engine.ticket(request)])
        message = jetstream.jetstream_pb2.DecodeRequest(max_tokens=request.max_tokens, token_content=ids)
        columns: list[Columns] = [[] for _ in request.seeds]
        async for response in self._orchestrator.Decode(message):
            for sample, rows in zip(response.stream_content.samples, columns, strict=False):
                if sample.token_ids:
                    rows.append(list(sample.token_ids))
        return columns

    def _completion(self, request: Request, place: int, index: int, columns: Columns) -> Completion:
        token_ids, logprobs, versions = unpack(columns)
        if len(versions) != 1:
            raise RuntimeError(f"Completion of JetStream with weight versions {sorted(versions)} instead of one.")
        reason = "stop" if int(token_ids[-1]) in self._stop_ids else "length"
        limits = {"max_tokens": request.max_tokens, "stop_ids": self._stop_ids, "vocab_size": self._vocab_size}
        if flaw := completion_flaw(token_ids, logprobs, reason, **limits):
            raise RuntimeError(f"Invalid completion of JetStream for problem {request.problem_id!r}: {flaw}.")
        return Completion(place, index, token_ids, logprobs, reason, np.full(len(token_ids), versions.pop(), np.int32))
