"""Measures each stage of a training step separately on random weights and tokens, and counts its FLOPs and bytes."""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
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
from poly_epo_jax.model.transformer import abstract_model, init_params
from poly_epo_jax.parallel.sharding import param_shardings
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.embedded.slots import Job, Slots, capacity
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync
from poly_epo_jax.step.update import PolicyUpdate, TrainState, make_update
from poly_epo_jax.types import Params, Sampling


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a training step. `tokens`, `flops` and `moved_bytes` are totals of all devices.

    Attributes:
      name: Name of the stage.
      seconds: Duration per training step, in seconds.
      tokens: Number of processed tokens, or 0 if the stage does not process tokens.
      flops: FLOPs of the model, without recomputation in the backward pass. 0 if they are not counted.
      moved_bytes: Minimum memory traffic in bytes: weights, gradients, moments, keys and values. 0 if it is not
        counted.
      compile_seconds: Compilation time in seconds. For generation, duration of the first run, which includes
        compilation. For writing weights, additional duration of the first run.
      device_bytes: Peak memory of one device during the stage according to its compiled programs, in bytes.
      in_step: False for log-probabilities that a step with one minibatch and no KL term does not compute. One pass over
        all sequences is then measured.
    """

    name: str
    seconds: float
    tokens: int
    flops: float
    moved_bytes: float | int
    compile_seconds: float
    device_bytes: int
    in_step: bool = True


def stage_row(stage: Stage, roofline: Roofline, num_devices: int) -> dict[str, Any]:
    """Computes the metrics of a stage relative to its roofline.

    Args:
      stage: Measured stage.
      roofline: Peak rates of one device.
      num_devices: Number of devices.

    Returns:
      The fields of the stage, its throughput, and its roofline, which is the longer of the times that its FLOPs and its
      memory traffic take at peak rates.
    """
    arithmetic = stage.flops / (roofline.flops_per_second * num_devices)
    traffic = stage.moved_bytes / (roofline.bytes_per_second * num_devices)
    bound = max(arithmetic, traffic)
    return dataclasses.asdict(stage) | {
        "tokens_per_second": stage.tokens / stage.seconds,
        "share_of_matmul_peak": arithmetic / stage.seconds,
        "roofline_seconds": bound,
        "share_of_roofline": bound / stage.seconds,
        "bound": "arithmetic" if arithmetic >= traffic else "memory",
    }


def stage_names(config: Config) -> list[str]:
    """Lists the stages of a configuration that can be measured, in the order of `time_stages`."""
    sampler = SAMPLERS[config.rollouts.name]
    generate = ["generate"] if sampler.has_slots else []
    write = ["write_weights"] if sampler.needs_urls and config.rollouts.weight_sync == "disk" else []
    return [*generate, *write, "logprobs", "gradient", "optimizer"]


def time_stages(
    config: Config, model_config: ModelConfig, mesh: Mesh, workload: Workload, names: Collection[str]
) -> Iterator[Stage]:
    """Measures the stages of a training step one after another.

    The programs of the update are measured on one microbatch, and their times are scaled to all microbatches. The
    devices hold the weights and moments during all stages, as in a run, but no reference policy.

    Args:
      config: Configuration of the run.
      model_config: Configuration of the model.
      mesh: Mesh on which the stages run.
      workload: Sequences of the step.
      names: Stages to measure, of `stage_names`.

    Yields:
      Each stage as soon as it has been measured: generation with the embedded sampler, writing weights for servers that
      read them from disk, and the three programs of the update.
    """
    model = abstract_model(model_config)
    update = make_update(config, model, mesh)
    params = jax.jit(functools.partial(init_params, model_config), out_shardings=param_shardings(model, mesh))()
    state = update.init(params)
    del params  # The state has a copy.
    if "generate" in names:
        yield _generate(config, model_config, mesh, state, workload)
    if "write_weights" in names:
        yield _write_weights(config, model_config, state.params)
    yield from _update_stages(config, model_config, update, state, workload, names)


def _generate(config: Config, model_config: ModelConfig, mesh: Mesh, state: TrainState, workload: Workload) -> Stage:
    """Measures the embedded sampler on at most two requests per slot, and scales the results to the whole batch."""
    train, max_length = config.train, config.train.max_prompt_tokens + config.sampling.max_tokens
    num_slots, max_prompts = capacity(
        mesh, config.rollouts.max_concurrent, len(workload.response_lengths), train.num_generations
    )
    lengths = workload.response_lengths[: 2 * num_slots]
    with jax.set_mesh(mesh):
        weights = jax.jit(functools.partial(decoding_weights, model_config))(state.params)
    rng, num_prompts = np.random.default_rng(0), -(-len(lengths) // train.num_generations)
    prompts = [rng.integers(0, model_config.vocab_size, train.max_prompt_tokens) for _ in range(num_prompts)]
    jobs = [Job(i // train.num_generations, i, length) for i, length in enumerate(lengths.tolist())]
    # The jobs specify the length of each response, so no stop token is required.
    no_stop_tokens, sampling = np.zeros(0, np.int32), Sampling(**config.sampling)

    def run() -> None:
        slots = Slots(
            model_config, weights, mesh, no_stop_tokens, prompts, jobs, sampling, num_slots, max_prompts, max_length
        )
        while not slots.is_done:
            slots.advance()

    compile_seconds, seconds = first_and_median_seconds(run, repeats=2)
    scale = workload.response_lengths.sum() / lengths.sum()
    work, moved = _decoding_cost(model_config, train.max_prompt_tokens, lengths, num_prompts, num_slots)
    cache = num_slots * flops.cache_bytes(model_config, max_length, np.dtype(model_config.dtype).itemsize) / mesh.size
    return Stage(
        "generate",
        seconds * scale,
        int(workload.response_lengths.sum()),
        work * scale,
        moved * scale,
        compile_seconds,
        int(cache + _bytes(weights) + _bytes(state)),
    )


def _decoding_cost(
    model_config: ModelConfig, prompt_length: int, lengths: Int[np.ndarray, " S"], num_prompts: int, num_slots: int
) -> tuple[float, float]:
    """Returns (FLOPs, bytes) of token-by-token generation of responses of these lengths, with one pass per prompt."""
    prompts, none = np.full(len(lengths), prompt_length), np.zeros_like(lengths)
    work = flops.forward_flops(model_config, prompts[:num_prompts], none[:num_prompts])
    work += flops.forward_flops(model_config, prompts, lengths) - flops.forward_flops(model_config, prompts, none)
    value_bytes = np.dtype(model_config.dtype).itemsize
    # Each token reads the keys and values of its sequence. Each decoding step generates one token per slot and reads
    # all weights once.
    contexts = np.concatenate([prompt_length + np.arange(1, length + 1) for length in lengths])
    cached = float(flops.cache_bytes(model_config, contexts, value_bytes))
    return work, cached + float(lengths.sum()) / num_slots * flops.total_weights(model_config) * value_bytes


def _update_stages(
    config: Config,
    model_config: ModelConfig,
    update: PolicyUpdate,
    state: TrainState,
    workload: Workload,
    names: Collection[str],
) -> Iterator[Stage]:
    """Measures the programs of an update on one microbatch that represents all microbatches. Donates the state.

    `logprobs` computes old and reference log-probabilities. The old log-probabilities of the first minibatch are not
    computed: it is trained on with the policy that generated it, so its probability ratios are 1.
    """
    batch, runs = workload.minibatches[0][0], workload.runs
    in_step = runs["logprobs"] > 0
    runs["logprobs"] = runs["logprobs"] or runs["gradient"]
    lowered, programs = update.lower(*batch.tokens.shape), dict[str, Any]()
    batch = update.place(batch)
    weight_bytes, moment_bytes, trained_bytes = map(_bytes, (state.params, state.opt_state, state.trainable))
    reference_bytes = workload.has_reference * _bytes(state.trainable if config.lora.rank else state.params)
    tokens = int((workload.prompt_lengths + workload.response_lengths).sum())
    forward = flops.forward_flops(model_config, workload.prompt_lengths, workload.response_lengths)

    def stage(name: str, run: Callable[[], Any], tokens: int, work: float, moved: int) -> Stage:
        start = time.perf_counter()
        programs[name] = lowered[name].compile()
        compile_seconds = time.perf_counter() - start
        seconds = first_and_median_seconds(run)[1] * runs[name]
        # The arguments of the optimizer include the moments. During the other programs, the moments occupy memory.
        held = _program_bytes(programs[name]) + reference_bytes + (0 if name == "optimizer" else moment_bytes)
        moved *= runs[name] * update.mesh.size
        return Stage(name, seconds, tokens, work, moved, compile_seconds, held, in_step or name != "logprobs")

    def logprobs() -> Any:
        return programs["logprobs"](state.params, batch)

    def gradient() -> Any:
        nonlocal gradients
        gradients, metrics = programs["gradient"](state.trainable, state.frozen, gradients, batch)
        return metrics

    def optimizer() -> Any:
        nonlocal state
        state, metrics = programs["optimizer"](state, gradients)
        return metrics

    if "logprobs" in names:
        fraction = runs["logprobs"] / runs["gradient"]
        yield stage("logprobs", logprobs, int(tokens * fraction), forward * fraction, weight_bytes)
    gradients = update.zero_gradients(state)
    if "gradient" in names:
        # The forward and backward passes each read the weights. The gradient sums are read and written.
        work = flops.gradient_passes(config, model_config) * forward
        yield stage("gradient", gradient, tokens, work, 2 * (weight_bytes + trained_bytes))
    if "optimizer" in names:
        # Trained weights and moments are read and written, and gradients are read.
        yield stage("optimizer", optimizer, tokens, 0.0, 3 * trained_bytes + 2 * moment_bytes)


def _write_weights(config: Config, model_config: ModelConfig, params: Params) -> Stage:
    """Measures writing the weights to rollouts.weights_dir. The time in which servers load them is not included."""
    folder = Path(config.rollouts.weights_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
        sync = DiskSync(Path(name), "bench", model_config, config.rollouts.weights_dtype)

        def write() -> None:
            sync.prepare(params, "bench")
            sync.close()  # Removes the files, like a run, so that the disk does not fill up.

        first, seconds = first_and_median_seconds(write, repeats=2)
    num_bytes = flops.total_weights(model_config) * np.dtype(config.rollouts.weights_dtype).itemsize
    return Stage("write_weights", seconds, 0, 0.0, num_bytes, max(first - seconds, 0.0), _bytes(params))


def _program_bytes(compiled: Any) -> int:
    """Returns the bytes of a compiled program's arguments, results and temporary arrays on one device."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _bytes(tree: Any) -> int:
    """Returns the bytes of a tree of arrays on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
