"""Times each stage of a training step by itself, on random weights and tokens, and counts its FLOPs and bytes."""

import dataclasses
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from poly_epo_jax.bench.roofline import Roofline, first_and_median_seconds
from poly_epo_jax.bench.workload import Workload
from poly_epo_jax.config.keys import Config
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.flops import gradient_passes
from poly_epo_jax.model.qwen3 import Qwen3, abstract_model, first_params
from poly_epo_jax.parallel.sharding import param_shardings
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.embedded.slots import Job, Slots, capacity
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync
from poly_epo_jax.step.update import make_update
from poly_epo_jax.types import Params, Sampling


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a training step. Everything except `device_bytes` is summed over all devices.

    `flops` are the model's own, without recomputation for the backward pass. `moved_bytes` is the least that must move
    to or from memory: weights, gradients, moments, keys and values. Either is 0 if it is not counted.
    """

    name: str
    seconds: float
    tokens: int
    flops: float
    moved_bytes: float | int
    compile_seconds: float
    device_bytes: int  # the most that one device holds while the stage runs


def stage_row(stage: Stage, roofline: Roofline, num_devices: int) -> dict[str, Any]:
    """The stage's figures, and its roofline: the seconds that its arithmetic or memory traffic takes at peak rates."""
    arithmetic = stage.flops / (roofline.flops_per_second * num_devices)
    traffic = stage.moved_bytes / (roofline.bytes_per_second * num_devices)
    bound = max(arithmetic, traffic)
    return dataclasses.asdict(stage) | {
        "tokens_per_second": stage.tokens / stage.seconds if stage.seconds else 0.0,
        "share_of_matmul_peak": arithmetic / stage.seconds if stage.seconds else 0.0,
        "roofline_seconds": bound,
        "share_of_roofline": bound / stage.seconds if stage.seconds else 0.0,
        "bound": "arithmetic" if arithmetic >= traffic else "memory",
    }


def time_stages(config: Config, shape: ModelConfig, mesh: Mesh, workload: Workload) -> Iterator[Stage]:
    """Runs the stages one after another. The update runs on one microbatch, and its time is scaled to all of them."""
    model = abstract_model(shape)
    shardings = param_shardings(model, mesh)
    params = jax.jit(functools.partial(first_params, shape), out_shardings=shardings)()
    sampler = SAMPLERS[config.rollouts.name]
    if sampler.has_slots:
        yield _generate(config, shape, mesh, params, workload)
    update = _Update(config, model, mesh, params, workload)
    yield update.logprobs()
    yield update.gradient()
    yield update.optimizer()
    if sampler.needs_urls and config.rollouts.weight_sync == "disk":
        yield _write_weights(config, shape, params)


def _generate(config: Config, shape: ModelConfig, mesh: Mesh, params: Params, workload: Workload) -> Stage:
    """The embedded sampler on twice as many requests as it has slots, scaled to the tokens of the whole batch."""
    train, longest = config.train, config.train.max_prompt_tokens + config.sampling.max_tokens
    num_slots, max_prompts = capacity(
        mesh, config.rollouts.max_concurrent, len(workload.response_lengths), train.num_generations
    )
    lengths = workload.response_lengths[: 2 * num_slots]
    with jax.set_mesh(mesh):
        weights = jax.jit(functools.partial(decoding_weights, shape))(params)
    rng = np.random.default_rng(0)
    num_prompts = -(-len(lengths) // train.num_generations)
    prompts = [rng.integers(0, shape.vocab_size, train.max_prompt_tokens) for _ in range(num_prompts)]
    jobs = [Job(i // train.num_generations, i, length) for i, length in enumerate(lengths.tolist())]
    no_stop_tokens, sampling = np.zeros(0, np.int32), Sampling(**config.sampling)  # each length is given

    def run() -> None:
        slots = Slots(shape, weights, mesh, no_stop_tokens, prompts, jobs, sampling, num_slots, max_prompts, longest)
        while not slots.is_done:
            slots.advance()

    compile_seconds, seconds = first_and_median_seconds(run, repeats=2)
    scale = workload.response_lengths.sum() / lengths.sum()
    work, moved = _decoding_cost(shape, train.max_prompt_tokens, lengths, num_prompts, num_slots)
    cache = num_slots * longest * flops.cache_bytes_per_token(shape, np.dtype(shape.dtype).itemsize) / mesh.size
    return Stage(
        "generate",
        seconds * scale,
        int(workload.response_lengths.sum()),
        work * scale,
        moved * scale,
        compile_seconds,
        int(cache + _bytes(weights) + _bytes(params)),
    )


def _decoding_cost(
    shape: ModelConfig, prompt_length: int, lengths: Int[np.ndarray, " S"], num_prompts: int, num_slots: int
) -> tuple[float, float]:
    """(FLOPs, bytes) of generating responses of these lengths token by token, with each prompt read once."""
    prompts, none = np.full(len(lengths), prompt_length), np.zeros_like(lengths)
    work = flops.forward_flops(shape, prompts[:num_prompts], none[:num_prompts])
    work += flops.forward_flops(shape, prompts, lengths) - flops.forward_flops(shape, prompts, none)
    value_bytes = np.dtype(shape.dtype).itemsize
    # Each token reads its sequence's keys and values; a decoding step, one token per slot, reads every weight once.
    contexts = float((lengths * prompt_length + lengths * (lengths + 1) / 2).sum())
    cached = contexts * flops.cache_bytes_per_token(shape, value_bytes)
    return work, cached + float(lengths.sum()) / num_slots * flops.total_weights(shape) * value_bytes


class _Update:
    """The three compiled programs of an update, and one microbatch, whose time stands for that of the others."""

    def __init__(self, config: Config, model: Qwen3, mesh: Mesh, params: Params, workload: Workload):
        self._runs, self._num_devices, batch = workload.runs, mesh.size, workload.minibatches[0][0]
        update = make_update(config, model, mesh)
        self._programs: dict[str, tuple[Any, float]] = {}
        for name, lowered in update.lower(*batch.tokens.shape).items():
            start = time.perf_counter()
            self._programs[name] = lowered.compile(), time.perf_counter() - start
        self._state = update.init(params)
        self._gradients = update.zero_gradients(self._state)
        self._batch = update.place(batch)
        self._weight_bytes, self._moment_bytes = _bytes(self._state.params), _bytes(self._state.opt_state)
        self._trained_bytes = _bytes(self._state.trainable)
        reference = self._state.trainable if config.lora.rank else self._state.params
        self._reference_bytes = workload.has_reference * _bytes(reference)
        self._passes = gradient_passes(config, model.config)
        self._tokens = int((workload.prompt_lengths + workload.response_lengths).sum())
        self._forward = flops.forward_flops(model.config, workload.prompt_lengths, workload.response_lengths)

    def logprobs(self) -> Stage:
        """A forward pass of each microbatch whose old or reference log-probabilities a step computes."""
        times = self._runs["logprobs"]
        share = times / self._runs["gradient"]

        def run() -> Any:
            return self._programs["logprobs"][0](self._state.params, self._batch)

        moved = times * self._weight_bytes
        return self._stage("logprobs", run, int(self._tokens * share), self._forward * share, moved)

    def gradient(self) -> Stage:
        """Weights are read by the forward and the backward pass; the sums of gradients are read and written."""

        def run() -> Any:
            weights = self._state.trainable, self._state.frozen
            self._gradients, metrics = self._programs["gradient"][0](*weights, self._gradients, self._batch)
            return metrics

        moved = self._runs["gradient"] * 2 * (self._weight_bytes + self._trained_bytes)
        return self._stage("gradient", run, self._tokens, self._passes * self._forward, moved)

    def optimizer(self) -> Stage:
        """Trained weights and both moments are read and written; gradients are read."""

        def run() -> Any:
            self._state, metrics = self._programs["optimizer"][0](self._state, self._gradients)
            return metrics

        moved = self._runs["optimizer"] * (3 * self._trained_bytes + 2 * self._moment_bytes)
        return self._stage("optimizer", run, self._tokens, 0.0, moved)

    def _stage(self, name: str, run: Callable[[], Any], tokens: int, work: float, moved: int) -> Stage:
        compiled, compile_seconds = self._programs[name]
        seconds = first_and_median_seconds(run)[1] * self._runs[name]
        # The optimizer's arguments include the moments; while the other programs run, the moments are merely held.
        held = _program_bytes(compiled) + self._reference_bytes + (0 if name == "optimizer" else self._moment_bytes)
        return Stage(name, seconds, tokens, work, moved * self._num_devices, compile_seconds, held)


def _write_weights(config: Config, shape: ModelConfig, params: Params) -> Stage:
    """Writes the weights to where servers read them. The time that servers take to load them is not measured."""
    folder = Path(config.rollouts.weights_dir)
    folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=folder))
    sync = DiskSync(folder, "bench", shape, config.rollouts.weights_dtype)
    try:

        def write() -> None:
            sync.prepare(params, "bench")
            sync.close()  # removes the files, as a run does, so that the folder does not fill up

        first, seconds = first_and_median_seconds(write, repeats=2)
        num_bytes = flops.total_weights(shape) * np.dtype(config.rollouts.weights_dtype).itemsize
    finally:
        sync.close()
        shutil.rmtree(folder, ignore_errors=True)
    return Stage("write weights", seconds, 0, 0.0, num_bytes, max(first - seconds, 0.0), _bytes(params))


def _program_bytes(compiled: Any) -> int:
    """Bytes of a compiled program's arguments, results and temporary arrays on one device."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes


def _bytes(tree: Any) -> int:
    """Bytes of a tree of arrays on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
