"""A sampler inside the trainer, driven by JetStream: its queues, slots and continuous batching, with our programs.

JetStream's threads, and an event loop that reads from them, run alongside the trainer. A prompt is read once for all
generations of its slot.
"""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from poly_epo_jax.model.decoding import decoding_weights, whole_weights
from poly_epo_jax.model.qwen3 import Qwen3
from poly_epo_jax.rollouts.completion_check import completion_flaw
from poly_epo_jax.rollouts.embedded.sampler import run_to_completion
from poly_epo_jax.rollouts.jetstream import mended as jetstream
from poly_epo_jax.rollouts.jetstream.engine import EngineSize, Policy, Qwen3Engine, unpack
from poly_epo_jax.types import Completion, Params, Request, Sampling

Columns = list[list[int]]
"""What JetStream returns for one generation: a row for each token."""


class JetStreamSampler:
    """Decodes on the trainer's mesh. Only one call's generations run at a time; the next call and new weights wait.

    Args:
      model: the policy, possibly abstract: only its configuration is used.
      stop_ids: a generation ends with any of these tokens.
      size: the engine's size. A prompt with more generations than fit in one slot takes several slots.
    """

    def __init__(self, model: Qwen3, mesh: Mesh, stop_ids: Sequence[int], size: EngineSize):
        self._mesh, self._stop_ids, self._size = mesh, tuple(stop_ids), size
        self._vocab_size = model.config.vocab_size
        self._decoding_weights = jax.jit(partial(decoding_weights, model.config))
        self._weights: Params | None = None
        self._engine = Qwen3Engine(model.config, mesh, stop_ids, size)
        # JetStream calls it interleaved when one engine both reads prompts and decodes.
        self._driver = jetstream.orchestrator.Driver(
            prefill_engines=[self._engine],
            generate_engines=[self._engine],
            prefill_params=[None],
            generate_params=[None],
            interleaved_mode=True,
            jax_padding=False,
        )
        self._orchestrator = jetstream.orchestrator.LLMOrchestrator(driver=self._driver)
        # JetStream passes tokens to an event loop, and breaks once that has ended; the trainer's may end at any time.
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()  # on that loop; its holder has all slots
        self._thread = threading.Thread(target=self._loop.run_forever, name="jetstream-rollouts", daemon=True)
        self._thread.start()

    async def push_weights(self, params: Params, version: int) -> None:
        """Waits for the generations in progress, then copies the weights into the layout that decoding reads."""
        await self._on_loop(self._swap(params, version))

    async def _swap(self, params: Params, version: int) -> None:
        async with self._turn:
            with jax.set_mesh(self._mesh):
                self._weights, self._version = self._decoding_weights(params), version

    def close(self) -> None:
        """Waits for the generations in progress, then ends the threads."""
        asyncio.run_coroutine_threadsafe(self._idle(), self._loop).result()
        self._driver.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yields the completions of a slot, at most `samples_per_slot` of one request, once all of them have finished.

        The event loop stays free meanwhile.

        Raises:
          ValueError: a response may exceed the cache that the engine was created with.
          RuntimeError: JetStream or the engine has failed, or there are no weights yet.
        """
        if self._weights is None:
            raise RuntimeError("There are no weights to generate with; call push_weights first.")
        if sampling.max_tokens > self._size.max_tokens:
            raise ValueError(
                f"Responses of {sampling.max_tokens} tokens do not fit JetStream's cache, which was made for "
                f"sampling.max_tokens={self._size.max_tokens}; raise that."
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
            running.cancel()  # if it has not ended
            await run_to_completion(self._on_loop(self._idle()))

    async def _on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _idle(self) -> None:
        """Returns once no slot is taken."""
        async with self._turn:
            pass

    async def _decode(self, requests: Sequence[Request], sampling: Sampling, finished: asyncio.Queue) -> None:
        size = self._size.samples_per_slot
        async with self._turn:
            assert self._weights is not None
            with jax.set_mesh(self._mesh):
                self._engine.policy = Policy(whole_weights(self._weights), self._version, sampling)
            slots = [
                asyncio.create_task(self._slot(place, request, start, finished))
                for place, request in enumerate(requests)
                for start in range(0, len(request.seeds), size)
            ]
            try:
                await asyncio.wait(slots)
            finally:
                # Generations still in progress end with the next step; nothing reads the weights after that.
                self._engine.policy = None
                await asyncio.wait(slots)

    async def _slot(self, place: int, request: Request, start: int, finished: asyncio.Queue) -> None:
        """Puts the completions of a slot's seeds, from `start` on, into `finished`; or else the error that occurred."""
        seeds = request.seeds[start : start + self._size.samples_per_slot]
        try:
            samples = await self._columns(dataclasses.replace(request, seeds=seeds))
            completions = [self._completion(request, place, start + i, columns) for i, columns in enumerate(samples)]
        except Exception as error:
            completions = [error]
        for completion in completions:
            finished.put_nowait(completion)

    async def _columns(self, request: Request) -> list[Columns]:
        """The columns of a slot's generations, collected token by token."""
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
            raise RuntimeError(f"JetStream sampled a generation with the weight versions {sorted(versions)}, not one.")
        reason = "stop" if int(token_ids[-1]) in self._stop_ids else "length"
        limits = {"max_tokens": request.max_tokens, "stop_ids": self._stop_ids, "vocab_size": self._vocab_size}
        if flaw := completion_flaw(token_ids, logprobs, reason, **limits):
            raise RuntimeError(f"JetStream failed at problem {request.problem_id}: {flaw}.")
        return Completion(place, index, token_ids, logprobs, reason, versions.pop())
