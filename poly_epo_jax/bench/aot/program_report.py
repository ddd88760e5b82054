"""Collects the memory, costs and communication of a configuration's programs for `bench --compile_for`."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from poly_epo_jax.bench.aot.attention_work import kernel_flops, kernel_pairs, own_pairs
from poly_epo_jax.bench.aot.estimate import CollectiveUse, ProgramEstimate, Rates, estimate_cost
from poly_epo_jax.bench.aot.hlo import ARRAY, parse
from poly_epo_jax.bench.workload import make_workload
from poly_epo_jax.config.keys import Config
from poly_epo_jax.memory_plan.plan import Plan
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.experts import block_size
from poly_epo_jax.model.logprobs import chunk_size
from poly_epo_jax.parallel.devices import device_name
from poly_epo_jax.step.packing import row_tokens, rows_per_device

PROMPT_FRACTION = 0.15
"""Prompt length in the estimated step as a fraction of train.max_prompt_tokens. Mathematics prompts are short."""

NUM_COSTS = 12  # Number of largest costs that are listed for each program.


class ProgramReport:
    """Analyzes compiled programs and summarizes their costs.

    Args:
      config: Configuration of the run.
      model_config: Configuration of the model.
      mesh: Mesh for which the programs are compiled.
      rates: Peak rates of one device.
      plan: Memory plan of the same configuration.

    Attributes:
      programs: Results by the name of the program.
    """

    def __init__(self, config: Config, model_config: ModelConfig, mesh: Mesh, rates: Rates, plan: Plan):
        self._config, self._model_config, self._mesh, self._rates, self._plan = config, model_config, mesh, rates, plan
        short = dataclasses.replace(
            config.train, max_prompt_tokens=int(PROMPT_FRACTION * config.train.max_prompt_tokens)
        )
        self._workload = make_workload(dataclasses.replace(config, train=short), model_config.vocab_size, mesh.shape)
        self._segment_ids = np.concatenate(
            [batch.segment_ids for minibatch in self._workload.minibatches for batch in minibatch]
        )
        self.programs: dict[str, dict[str, Any]] = {}

    def add(self, name: str, compiled: Any) -> None:
        """Analyzes a program and adds the results to `programs`.

        Args:
          name: Name of the program.
          compiled: Program that was compiled for the mesh.
        """
        config, mesh = self._config, self._mesh.shape
        text = compiled.as_text()
        chunk = chunk_size(device_name(self._mesh.devices.flat[0].device_kind), self._model_config.vocab_size)
        chunks = -(-rows_per_device(config, mesh) * row_tokens(config) // mesh["tensor"] // chunk)
        trips = (1, 1) if name == "decode" else (chunks, self._expert_blocks())
        found = estimate_cost(parse(text), self._rates, self._kernel_flops, *trips)
        useful = self._useful_flops(name)
        self.programs[name] = {
            "memory": self._memory(name, compiled),
            "product_tflop": found.flops / 1e12,
            "kernel_tflop": found.kernel_flops / 1e12,
            "useful_share": useful / (found.flops + found.kernel_flops) if useful else None,
            "kernels": found.kernels,
            "collectives": list(summarize_collectives(found)),
            "vocabulary_arrays": self._vocabulary_arrays(text),
            "seconds": found.seconds,
            "total_seconds": found.total_seconds,
            "largest_costs": dict(sorted(found.costs.items(), key=lambda cost: -cost[1])[:NUM_COSTS]),
        }

    def _expert_blocks(self) -> int:
        """Returns the number of blocks of experts on one device and layer if all experts have equally many tokens."""
        model, mesh = self._model_config, self._mesh.shape
        if not model.num_experts:
            return 1
        tokens = rows_per_device(self._config, mesh) * row_tokens(self._config) * mesh["expert"]
        pairs = tokens * model.experts_per_token
        blocks = -(-pairs // model.num_experts // block_size(pairs, model.num_experts))
        return blocks * model.num_experts // mesh["expert"]

    def _kernel_flops(self, kernel: str) -> float:
        heads = self._model_config.num_heads // self._mesh.shape["tensor"]
        # All devices have rows of similar content.
        fraction = rows_per_device(self._config, self._mesh.shape) / len(self._segment_ids)
        return fraction * kernel_flops(self._model_config, self._segment_ids, heads, kernel)

    def _useful_flops(self, name: str) -> float:
        """Returns the FLOPs of the model in one run on one device, without recomputation, padding and masked pairs."""
        passes = {"logprobs": 1.0, "gradient": flops.gradient_passes(self._config, self._model_config)}.get(name, 0.0)
        lengths = self._workload.prompt_lengths, self._workload.response_lengths
        return (
            passes
            * flops.forward_flops(self._model_config, *lengths)
            / self._workload.runs["gradient"]
            / self._mesh.size
        )

    def _memory(self, name: str, compiled: Any) -> dict[str, int | None]:
        """Returns the memory of one device during the program, in bytes.

        It consists of the arrays of the program and, according to the memory plan, of arrays that are resident during
        the program.
        """
        memory = compiled.memory_analysis()
        held = {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
        if self._plan.machine.platform == "tpu":  # There, `temp_size_in_bytes` exceeds the assigned buffers.
            held["temporaries"] = memory.peak_memory_in_bytes - held["arguments"] - held["results"]
        # The arguments of the optimizer include the moments. During the other programs, the moments occupy memory.
        resident_elsewhere = 0 if name == "optimizer" else self._plan.resident["optimizer moments"]
        resident_elsewhere += self._plan.resident.get("reference policy", 0)
        planned = self._plan.stage_bytes(name) if name in self._plan.stages else None
        return held | {
            "resident_elsewhere": resident_elsewhere,
            "total": sum(held.values()) + resident_elsewhere,
            "planned": planned,
        }

    def _vocabulary_arrays(self, text: str) -> list[str]:
        """Returns the types of arrays with the logits of all tokens of a device, which programs should not contain."""
        tokens = (
            rows_per_device(self._config, self._mesh.shape) * row_tokens(self._config) // self._mesh.shape["tensor"]
        )
        vocabulary = {self._model_config.vocab_size, self._model_config.vocab_size // self._mesh.shape["tensor"]}

        def is_logits(sizes: str) -> bool:
            axes = [int(size) for size in sizes.split(",") if size]
            others = [math.prod(axes) // size for size in vocabulary.intersection(axes)]
            return any(other >= tokens and other != self._model_config.hidden_size for other in others)

        return sorted({f"{kind}[{sizes}]" for kind, sizes in ARRAY.findall(text) if is_logits(sizes)})

    def step(self) -> dict[str, Any]:
        """Estimates the update of one step.

        Returns:
          The number of runs of each program, the seconds of the update, the model FLOPs utilization (MFU) of update and
          gradient, the mean sequence length, the fraction of padding, and the ratio of computed to visible attention
          pairs.
        """
        seconds = {name: program["total_seconds"] for name, program in self.programs.items()}
        runs = self._workload.runs
        total = sum(count * seconds[name] for name, count in runs.items())
        useful = sum(count * self._useful_flops(name) for name, count in runs.items())
        return {
            "runs": runs,
            "update_seconds": total,
            "update_mfu": useful / total / self._rates.flops_per_second,
            "gradient_mfu": self._useful_flops("gradient") / seconds["gradient"] / self._rates.flops_per_second,
            "tokens_per_sequence": float((self._workload.prompt_lengths + self._workload.response_lengths).mean()),
            "pad_share": self._workload.pad_share,
            "attention_work_ratio": self._attention_ratio(),
        }

    def _attention_ratio(self) -> float | None:
        """Returns the ratio of computed to visible attention pairs, or None without an attention kernel."""
        config, ids = self._model_config, self._segment_ids
        visited = [kernel_pairs(config, ids, kernel) for kernel in self.programs["gradient"]["kernels"]]
        return max(visited) / own_pairs(ids, config.layer_windows) if any(visited) else None


def summarize_collectives(found: ProgramEstimate) -> Iterator[dict[str, Any]]:
    """Yields the totals of a program's collectives.

    Collectives are grouped by kind, dtype, whether they are in a loop, and whether they are asynchronous.
    """
    groups: dict[tuple[Any, ...], list[CollectiveUse]] = {}
    for use in found.collectives:
        one = use.collective
        groups.setdefault((use.loops > 0, one.kind, one.dtype, one.asynchronous), []).append(use)
    for (in_loop, kind, dtype, asynchronous), members in sorted(groups.items()):
        yield {
            "kind": kind,
            "type": dtype,
            "in_loop": in_loop,
            "asynchronous": asynchronous,
            "runs": sum(use.times for use in members),
            "sent_bytes": sum(use.times * use.collective.sent_bytes for use in members),
            "waited_seconds": sum(use.waited_seconds for use in members),
        }
