"""A sampler inside the trainer, driven by JetStream: its queues, its slots, its continuous batching; our programs.

JetStream's threads, and an event loop of their own for those who read from them, live beside the trainer. A prompt is
read once for all generations of its slot.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, UInt32
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.qwen3 import Qwen3
from poly_epo_jax.rollouts.jetstream import mended as jetstream
from poly_epo_jax.rollouts.jetstream.engine import EngineSize, Policy, Qwen3Engine, Request, unpack
from poly_epo_jax.rollouts.tokens import encode_prompt, response_text
from poly_epo_jax.types import Generation, Group, Params, Problem, Sampling

Columns = list[list[int]]
"""What JetStream returns for one generation: a row for each token."""


class _Job(NamedTuple):
    """A problem's place among those of its call, its prompt, and the seeds of its generations."""

    place: int
    prompt: Int[np.ndarray, "L"]
    seeds: UInt32[np.ndarray, "N"]


class JetStreamRollouts:
    """Decodes on the trainer's mesh. One call's generations run at a time; the next one's, or new weights, wait.

    Args:
      model: the policy, possibly abstract: only its configuration is used.
      stop_ids: a generation ends with any of these tokens.
      size: of the engine. More generations of a prompt than a slot has take several slots.
    """

    def __init__(
        self, model: Qwen3, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], size: EngineSize
    ):
        self._mesh, self._tokenizer, self._stop_ids, self._size = mesh, tokenizer, tuple(stop_ids), size
        self._decoding_weights = jax.jit(partial(decoding_weights, model.config))
        self._weights: Params | None = None
        self._engine = Qwen3Engine(model.config, mesh, stop_ids, size)
        # One engine that reads prompts and decodes is what JetStream calls interleaved.
        self._driver = jetstream.orchestrator.Driver(
            prefill_engines=[self._engine],
            generate_engines=[self._engine],
            prefill_params=[None],
            generate_params=[None],
            interleaved_mode=True,
            jax_padding=False,
        )
        self._orchestrator = jetstream.orchestrator.LLMOrchestrator(driver=self._driver)
        # JetStream hands tokens to an event loop, and breaks when that has ended; the trainer's may end at any time.
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()  # on that loop: who holds it has all slots
        self._thread = threading.Thread(target=self._loop.run_forever, name="jetstream-rollouts", daemon=True)
        self._thread.start()

    async def update_weights(self, params: Params, version: int) -> None:
        """Waits for the generations under way, and copies the weights into the layout that decoding reads."""
        await self._on_loop(self._swap(params, version))

    async def _swap(self, params: Params, version: int) -> None:
        async with self._turn:
            with jax.set_mesh(self._mesh):
                self._weights, self._version = self._decoding_weights(params), version

    def close(self) -> None:
        """Waits for the generations under way, and ends the threads."""
        asyncio.run_coroutine_threadsafe(self._idle(), self._loop).result()
        self._driver.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def generate(
        self, problems: Sequence[Problem], num_generations: int, sampling: Sampling
    ) -> AsyncIterator[Group]:
        """Yields the problems' groups, each once it is complete. The event loop is free meanwhile.

        Raises:
          ValueError: a prompt is empty or longer than `max_prompt_tokens`, or a response may exceed `max_tokens`.
          RuntimeError: JetStream or the engine has failed, or there are no weights yet.
        """
        if not problems:
            return
        if self._weights is None:
            raise RuntimeError("There are no weights to generate with; call update_weights first.")
        if sampling.max_tokens > self._size.max_tokens:
            raise ValueError(
                f"Responses of {sampling.max_tokens} tokens do not fit JetStream's cache, which was made for "
                f"sampling.max_tokens={self._size.max_tokens}; raise that."
            )
        prompts = [encode_prompt(self._tokenizer, problem, self._size.max_prompt_tokens) for problem in problems]
        jobs = [
            _Job(place, prompt, sampling.generation_seeds(problem, num_generations))
            for place, (prompt, problem) in enumerate(zip(prompts, problems, strict=True))
        ]
        finished: asyncio.Queue[tuple[int, list[Columns]] | Exception] = asyncio.Queue()
        running = asyncio.run_coroutine_threadsafe(self._decode(jobs, sampling, finished), self._loop)
        try:
            for _ in problems:
                result = await self._on_loop(finished.get())
                if isinstance(result, Exception):
                    raise result
                place, samples = result
                generations = tuple(map(self._generation, samples))
                yield Group(problems[place], prompts[place], generations)
        finally:
            running.cancel()  # where it has not ended
            await _to_the_end(self._on_loop(self._idle()))

    async def _on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _idle(self) -> None:
        """Returns once no slot is taken."""
        async with self._turn:
            pass

    async def _decode(self, jobs: Sequence[_Job], sampling: Sampling, finished: asyncio.Queue) -> None:
        async with self._turn:
            assert self._weights is not None
            self._engine.policy = Policy(self._weights, self._version, sampling)
            groups = [asyncio.create_task(self._group(job, sampling.max_tokens, finished)) for job in jobs]
            try:
                await asyncio.wait(groups)
            finally:
                # Whoever was still under way ends with the next step, and nothing touches the weights any more.
                self._engine.policy = None
                await asyncio.wait(groups)

    async def _group(self, job: _Job, max_tokens: int, finished: asyncio.Queue) -> None:
        """Puts the place and the generations' columns into `finished`, or what went wrong."""
        samples = self._size.samples_per_slot
        parts = [job.seeds[start : start + samples] for start in range(0, len(job.seeds), samples)]
        requests = [Request(job.prompt, seeds, max_tokens) for seeds in parts]
        try:
            slots = await asyncio.gather(*map(self._slot, requests))
            finished.put_nowait((job.place, [columns for slot in slots for columns in slot]))
        except Exception as error:
            finished.put_nowait(error)

    async def _slot(self, request: Request) -> list[Columns]:
        """The columns of a request's generations, collected token by token."""
        ids = jetstream.jetstream_pb2.DecodeRequest.TokenContent(token_ids=[self._engine.ticket(request)])
        message = jetstream.jetstream_pb2.DecodeRequest(max_tokens=request.max_tokens, token_content=ids)
        columns: list[Columns] = [[] for _ in request.seeds]
        async for response in self._orchestrator.Decode(message):
            for sample, rows in zip(response.stream_content.samples, columns, strict=False):
                if sample.token_ids:
                    rows.append(list(sample.token_ids))
        return columns

    def _generation(self, columns: Columns) -> Generation:
        token_ids, logprobs, versions = unpack(columns)
        if len(versions) != 1:
            raise RuntimeError(f"JetStream drew one generation with the weight versions {sorted(versions)}, not one.")
        stopped = int(token_ids[-1]) in self._stop_ids
        text = response_text(self._tokenizer, token_ids, stopped)
        return Generation(token_ids, logprobs, text, "stop" if stopped else "length", versions.pop())


async def _to_the_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Who is cancelled meanwhile still waits for it: nothing goes on behind anyone's back."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
