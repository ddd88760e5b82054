"""Each stage of a training step alone, on random weights and tokens: how long it takes, and its floor."""

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
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int
from ml_collections import ConfigDict

from poly_epo_jax.algorithm import make_loss
from poly_epo_jax.batching import PackedBatch, TrainingSequence, pack
from poly_epo_jax.bench.roofline import first_and_median_seconds
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.qwen3 import Qwen3
from poly_epo_jax.model.sharding import param_shardings
from poly_epo_jax.rollouts.embedded.slots import Request, Slots, capacity
from poly_epo_jax.rollouts.sglang.weight_sync import DiskSync
from poly_epo_jax.types import Params, Sampling
from poly_epo_jax.update import PolicyUpdate

MEAN_LENGTH, SIGMA = 0.4, 0.6  # of a response: a share of sampling.max_tokens, and the spread of its logarithm


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage's share of a training step, over all devices but for `device_bytes`.

    `flops` are the model's own, without what is computed anew for the backward pass; `moved_bytes` what must go to or
    from memory at least: weights, gradients, moments, keys and values; neither is known for a stage where it is 0.
    """

    name: str
    seconds: float
    tokens: int
    flops: float
    moved_bytes: float | int
    compile_seconds: float
    device_bytes: int  # that one device holds while it runs, at most


@dataclasses.dataclass(frozen=True)
class Workload:
    """The S = P N sequences of one step, their lengths in tokens, and the minibatches that train on them."""

    prompt_lengths: Int[np.ndarray, "S"]
    response_lengths: Int[np.ndarray, "S"]
    minibatches: list[list[PackedBatch]]

    @property
    def pad_share(self) -> float:
        """Of the tokens that the update computes, those that are padding."""
        segment_ids = [batch.segment_ids for minibatch in self.minibatches for batch in minibatch]
        return float(np.mean([ids == 0 for ids in segment_ids]))


def make_workload(config: ConfigDict, vocab_size: int, num_rows: int) -> Workload:
    """Full-length prompts, and responses whose lengths are log-normal, as reasoning's are; both of random tokens.

    They are packed into microbatches of `num_rows` rows.
    """
    train, rng = config.train, np.random.default_rng(0)
    count = train.prompts_per_batch * train.num_generations
    mean = np.log(MEAN_LENGTH * config.sampling.max_tokens) - SIGMA**2 / 2
    responses = np.clip(np.rint(rng.lognormal(mean, SIGMA, count)), 1, config.sampling.max_tokens).astype(int)
    prompts = np.full(count, train.max_prompt_tokens)
    sequences = [
        TrainingSequence(
            rng.integers(0, vocab_size, prompt).astype(np.int32),
            rng.integers(0, vocab_size, response).astype(np.int32),
            np.zeros(response, np.float32),
            float(rng.standard_normal()),
            1 / (count * config.sampling.max_tokens),
        )
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    size = train.prompts_per_minibatch * train.num_generations
    minibatches = [pack(sequences[start : start + size], train.row_tokens, num_rows) for start in range(0, count, size)]
    return Workload(prompts, responses, minibatches)


def time_stages(config: ConfigDict, shape: ModelConfig, mesh: Mesh, workload: Workload) -> Iterator[Stage]:
    """Runs the stages one after another; the update on one microbatch, whose time is multiplied by their number."""
    model = nnx.eval_shape(lambda: Qwen3(shape, nnx.Rngs(0)))
    shardings = param_shardings(model, mesh)
    make_params = jax.jit(lambda: nnx.to_pure_dict(nnx.split(Qwen3(shape, nnx.Rngs(0)))[1]), out_shardings=shardings)
    params = make_params()
    if config.rollouts.name == "embedded":
        yield _generate(config, shape, mesh, params, workload)
    yield from _update(config, model, mesh, params, workload)
    if config.rollouts.name == "sglang" and config.rollouts.weight_sync == "disk":
        yield _write_weights(config, shape, params)


def _generate(config: ConfigDict, shape: ModelConfig, mesh: Mesh, params: Params, workload: Workload) -> Stage:
    """A full set of slots, over again until every request is done; counted as the whole batch, token by token."""
    train, max_tokens = config.train, config.sampling.max_tokens
    num_slots, max_prompts = capacity(
        mesh, config.rollouts.max_concurrent, len(workload.response_lengths), train.num_generations
    )
    lengths = workload.response_lengths[: 2 * num_slots]
    with jax.set_mesh(mesh):
        weights = jax.jit(functools.partial(decoding_weights, shape))(params)
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(0, shape.vocab_size, train.max_prompt_tokens)
        for _ in range(-(-len(lengths) // train.num_generations))
    ]
    requests = [Request(i // train.num_generations, i, length) for i, length in enumerate(lengths.tolist())]

    def run() -> None:
        slots = Slots(
            shape,
            weights,
            mesh,
            np.zeros(0, np.int32),  # no stop token: the lengths are given
            prompts,
            requests,
            Sampling(**config.sampling),
            num_slots,
            max_prompts,
            max_length=train.max_prompt_tokens + max_tokens,
        )
        while not slots.is_done:
            slots.advance()

    compile_seconds, seconds = first_and_median_seconds(run, repeats=2)
    scale = workload.response_lengths.sum() / lengths.sum()
    value_bytes = np.dtype(shape.dtype).itemsize
    cached = flops.cache_bytes_per_token(shape, value_bytes)
    # Each token reads its sequence's cache; every weight is read once for all slots.
    contexts = sum(length * train.max_prompt_tokens + length * (length + 1) / 2 for length in lengths.tolist())
    moved = contexts * cached + lengths.sum() / num_slots * flops.total_weights(shape) * value_bytes
    per_prompt = workload.prompt_lengths[: len(prompts)]
    held = num_slots * (train.max_prompt_tokens + max_tokens) * cached / mesh.size + _bytes(weights) + _bytes(params)
    work = flops.forward_flops(shape, per_prompt, np.zeros_like(per_prompt))  # the prompts, each once,
    work += flops.forward_flops(shape, workload.prompt_lengths[: len(lengths)], lengths)  # and the responses:
    work -= flops.forward_flops(shape, workload.prompt_lengths[: len(lengths)], np.zeros_like(lengths))
    return Stage(
        "generate",
        seconds * scale,
        int(workload.response_lengths.sum()),
        work * scale,
        moved * scale,
        compile_seconds,
        int(held),
    )


def _update(config: ConfigDict, model: Qwen3, mesh: Mesh, params: Params, workload: Workload) -> Iterator[Stage]:
    minibatches, shape, train = workload.minibatches, model.config, config.train
    update = PolicyUpdate(
        model,
        mesh,
        make_loss(config.algo),
        config.optimizer,
        total_updates=config.train.num_steps,
        temperature=config.sampling.temperature,
        entropy_coef=config.algo.entropy_coef,
    )
    programs = {}
    for name, lowered in update.lower(len(minibatches[0][0].tokens), train.row_tokens).items():
        start = time.perf_counter()
        compiled = lowered.compile()
        programs[name] = compiled, time.perf_counter() - start
    state = update.init(params)
    batch = update.place(minibatches[0][0])
    num_microbatches = sum(map(len, minibatches))
    weight_bytes, moment_bytes = _bytes(state.params), _bytes(state.opt_state)
    tokens = int((workload.prompt_lengths + workload.response_lengths).sum())
    forward = flops.forward_flops(shape, workload.prompt_lengths, workload.response_lengths)

    def stage(name: str, run: Callable[[], Any], times: int, tokens: int, work: float, moved: int, resident: int):
        compiled, compile_seconds = programs[name]
        seconds = first_and_median_seconds(run)[1] * times
        return Stage(name, seconds, tokens, work, moved, compile_seconds, _program_bytes(compiled) + resident)

    # The first minibatch needs no old log-probabilities.
    later = (len(minibatches) - 1) / len(minibatches)
    count = sum(map(len, minibatches[1:]))
    logprobs = functools.partial(programs["logprobs"][0], state.params, batch)
    moved = count * weight_bytes * mesh.size
    yield stage("logprobs", logprobs, count, int(tokens * later), forward * later, moved, moment_bytes)

    gradients = update.zero_gradients(state.params)

    def gradient() -> Any:
        nonlocal gradients
        gradients, metrics = programs["gradient"][0](state.params, gradients, batch)
        return metrics

    # Weights are read forwards and backwards, the sums of gradients read and written.
    moved = num_microbatches * 4 * weight_bytes * mesh.size
    yield stage("gradient", gradient, num_microbatches, tokens, 3 * forward, moved, moment_bytes)

    def optimizer() -> Any:
        nonlocal state
        state, metrics = programs["optimizer"][0](state, gradients)
        return metrics

    # Weights and both moments are read and written, gradients read.
    moved = len(minibatches) * (3 * weight_bytes + 2 * moment_bytes) * mesh.size
    yield stage("optimizer", optimizer, len(minibatches), tokens, 0.0, moved, 0)


def _write_weights(config: ConfigDict, shape: ModelConfig, params: Params) -> Stage:
    """Where the servers read them; what they take to load them is theirs."""
    folder = Path(config.rollouts.weights_dir)
    folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=folder))
    sync = DiskSync(folder, "bench", shape, config.rollouts.weights_dtype)
    try:

        def write() -> None:
            sync.prepare(params, "bench")
            sync.close()  # as a run removes the version before, so that the folder does not fill up

        first, seconds = first_and_median_seconds(write, repeats=2)
        num_bytes = flops.total_weights(shape) * np.dtype(config.rollouts.weights_dtype).itemsize
    finally:
        sync.close()
        shutil.rmtree(folder, ignore_errors=True)
    return Stage("write weights", seconds, 0, 0.0, num_bytes, max(first - seconds, 0.0), _bytes(params))


def _program_bytes(compiled: Any) -> int:
    """Arguments, results and temporary arrays of a compiled program on one device."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes


def _bytes(tree: Any) -> int:
    """Of a tree of arrays, on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
