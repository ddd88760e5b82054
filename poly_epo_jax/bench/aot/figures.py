"""The figures of a configuration's programs on a machine: what `--compile-for` shows and writes."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from poly_epo_jax.bench.aot.attention_work import kernel_flops, kernel_pairs, own_pairs
from poly_epo_jax.bench.aot.estimate import Estimate, Rates, Sent, estimate
from poly_epo_jax.bench.aot.hlo import ARRAY, parse
from poly_epo_jax.bench.workload import make_workload
from poly_epo_jax.config.keys import Config
from poly_epo_jax.memory_plan.plan import Plan
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.flops import gradient_passes
from poly_epo_jax.model.logprobs import chunk_size
from poly_epo_jax.parallel.devices import device_name
from poly_epo_jax.step.packing import row_tokens, rows_per_device

PROMPT_SHARE = 0.15
"""The prompts' share of train.max_prompt_tokens in the estimated step: mathematical prompts are short."""

LARGEST = 12  # costs listed for each program


class Figures:
    """Reads compiled programs one after another, and summarises them.

    Args:
      rates: those of one device.
      plan: the memory plan of the same configuration.
    """

    def __init__(self, config: Config, shape: ModelConfig, mesh: Mesh, rates: Rates, plan: Plan):
        self._config, self._shape, self._mesh, self._rates, self._plan = config, shape, mesh, rates, plan
        short = dataclasses.replace(config.train, max_prompt_tokens=int(PROMPT_SHARE * config.train.max_prompt_tokens))
        self._workload = make_workload(dataclasses.replace(config, train=short), shape.vocab_size, mesh.shape)
        batches = [batch.segment_ids for minibatch in self._workload.minibatches for batch in minibatch]
        self._segment_ids = np.concatenate(batches)
        self.programs: dict[str, dict[str, Any]] = {}

    def add(self, name: str, compiled: Any) -> None:
        """Reads a program that was compiled for the mesh."""
        config, mesh = self._config, self._mesh.shape
        text = compiled.as_text()
        chunk = chunk_size(device_name(self._mesh.devices.flat[0].device_kind), self._shape.vocab_size)
        chunks = -(-rows_per_device(config, mesh) * row_tokens(config) // mesh["tensor"] // chunk)
        found = estimate(parse(text), self._rates, self._kernel_flops, 1 if name == "decode" else chunks)
        useful = self._useful_flops(name)
        self.programs[name] = {
            "memory": self._memory(name, compiled),
            "product_tflop": found.flops / 1e12,
            "kernel_tflop": found.kernel_flops / 1e12,
            "useful_share": useful / (found.flops + found.kernel_flops) if useful else None,
            "kernels": found.kernels,
            "collectives": list(summarize(found)),
            "vocabulary_arrays": self._vocabulary_arrays(text),
            "seconds": found.seconds,
            "total_seconds": found.total_seconds,
            "largest_costs": dict(sorted(found.costs.items(), key=lambda cost: -cost[1])[:LARGEST]),
        }

    def _kernel_flops(self, kernel: str) -> float:
        heads = self._shape.num_heads // self._mesh.shape["tensor"]
        share = rows_per_device(self._config, self._mesh.shape) / len(
            self._segment_ids
        )  # the rows of a device are like those of all others
        return share * kernel_flops(self._shape, self._segment_ids, heads, kernel)

    def _useful_flops(self, name: str) -> float:
        """The model's own FLOPs in one run on one device: without recomputation, padding and other sequences."""
        passes = {"logprobs": 1.0, "gradient": gradient_passes(self._config, self._shape)}.get(name, 0.0)
        lengths = self._workload.prompt_lengths, self._workload.response_lengths
        return passes * flops.forward_flops(self._shape, *lengths) / self._workload.runs["gradient"] / self._mesh.size

    def _memory(self, name: str, compiled: Any) -> dict[str, int | None]:
        """Bytes of one device while the program runs: what it holds itself and, by the plan, what else is held."""
        memory = compiled.memory_analysis()
        held = {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
        # The optimizer's arguments include the moments; while the other programs run, the moments are merely held.
        beside = 0 if name == "optimizer" else self._plan.resident["optimizer moments"]
        beside += self._plan.resident.get("reference policy", 0)
        planned = self._plan.stage_bytes(name) if name in self._plan.stages else None
        return held | {"beside": beside, "total": sum(held.values()) + beside, "planned": planned}

    def _vocabulary_arrays(self, text: str) -> list[str]:
        """Arrays that hold logits of all of a device's tokens; there should be none."""
        tokens = (
            rows_per_device(self._config, self._mesh.shape) * row_tokens(self._config) // self._mesh.shape["tensor"]
        )
        vocabulary = {self._shape.vocab_size, self._shape.vocab_size // self._mesh.shape["tensor"]}

        def is_logits(sizes: str) -> bool:
            axes = [int(size) for size in sizes.split(",") if size]
            others = [math.prod(axes) // size for size in vocabulary.intersection(axes)]
            return any(other >= tokens and other != self._shape.hidden_size for other in others)

        return sorted({f"{kind}[{sizes}]" for kind, sizes in ARRAY.findall(text) if is_logits(sizes)})

    def step(self) -> dict[str, Any]:
        """Seconds of a step's update, and its MFU: the model's own FLOPs as a share of the devices' peak."""
        seconds = {name: program["total_seconds"] for name, program in self.programs.items()}
        runs = self._workload.runs
        total = sum(count * seconds[name] for name, count in runs.items())
        useful = sum(count * self._useful_flops(name) for name, count in runs.items())
        gradient = self._useful_flops("gradient") / seconds["gradient"] / self._rates.flops_per_second
        return {
            "runs": runs,
            "update_seconds": total,
            "update_mfu": useful / total / self._rates.flops_per_second,
            "gradient_mfu": gradient,
            "tokens_per_sequence": float((self._workload.prompt_lengths + self._workload.response_lengths).mean()),
            "pad_share": self._workload.pad_share,
            "attention_work_ratio": self._attention_ratio(),
        }

    def _attention_ratio(self) -> float | None:
        """Pairs of tokens in the blocks that attention kernels visit, per pair in the sequences; None: no kernel."""
        visited = [kernel_pairs(self._segment_ids, kernel) for kernel in self.programs["gradient"]["kernels"]]
        return max(visited) / own_pairs(self._segment_ids) if any(visited) else None


def summarize(found: Estimate) -> Iterator[dict[str, Any]]:
    """The collectives of a program, grouped by kind, type and place."""
    groups: dict[tuple[Any, ...], list[Sent]] = {}
    for sent in found.collectives:
        one = sent.collective
        groups.setdefault((sent.loops > 0, one.kind, one.dtype, one.asynchronous), []).append(sent)
    for (in_loop, kind, dtype, asynchronous), members in sorted(groups.items()):
        yield {
            "kind": kind,
            "type": dtype,
            "in_loop": in_loop,
            "asynchronous": asynchronous,
            "runs": sum(sent.times for sent in members),
            "sent_bytes": sum(sent.times * sent.collective.sent_bytes for sent in members),
            "waited_seconds": sum(sent.waited_seconds for sent in members),
        }
