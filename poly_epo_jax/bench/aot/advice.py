"""Which settings would shorten the update most, each by itself, according to the figures of its programs."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from poly_epo_jax.bench.aot.estimate import Rates
from poly_epo_jax.config.keys import Config
from poly_epo_jax.memory_plan.plan import largest_rows, make_plan
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.parallel.devices import Setting
from poly_epo_jax.step.packing import row_tokens, rows_per_device

REMAT_WORDS = ("none", "dots", "attention")  # the least recomputation first


class Advice(NamedTuple):
    """A setting, and the seconds of a step's update that it would save. By the plan, it fits into memory."""

    setting: str
    saved_seconds: float
    reason: str


def best_settings(
    config: Config,
    shape: ModelConfig,
    setting: Setting,
    memory_bytes: int | None,
    rates: Rates,
    programs: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, int],
) -> list[Advice]:
    """The two settings that save most, the best first.

    Args:
      programs, runs: as in `figures.Figures`.
    """
    found = [
        *_less_recomputation(config, shape, setting, memory_bytes, rates, programs, runs),
        *_more_rows(config, shape, setting, memory_bytes, programs, runs),
    ]
    return sorted((advice for advice in found if advice.saved_seconds > 0), key=lambda one: -one.saved_seconds)[:2]


def _less_recomputation(config, shape, setting, memory_bytes, rates, programs, runs) -> Iterator[Advice]:
    """The backward pass recomputes products and attention as `remat` says. Yields the first word that fits."""
    if shape.remat == "none" or memory_bytes is None:
        return
    tokens = rows_per_device(config, setting.mesh) * row_tokens(config)
    products = 2 * flops.layer_weights(shape) * tokens / setting.mesh["tensor"]
    attention = programs["logprobs"]["kernel_tflop"] * 1e12
    recomputed = {"full": products + attention, "attention": products, "dots": 0.0, "none": 0.0}
    for word in REMAT_WORDS:
        saved = recomputed[shape.remat] - recomputed[word]
        if make_plan(config, dataclasses.replace(shape, remat=word), setting, memory_bytes).fits:
            seconds = runs["gradient"] * saved / rates.flops_per_second
            yield Advice(f"model.remat={word}", seconds, f"{saved / 1e12:.0f} TFLOP a microbatch are not run again")
            return


def _more_rows(config, shape, setting, memory_bytes, programs, runs) -> Iterator[Advice]:
    """With more rows per microbatch, weights are gathered and gradients scattered less often: once per microbatch."""
    rows, most = rows_per_device(config, setting.mesh), largest_rows(config, shape, setting, memory_bytes)
    waited = programs["gradient"]["seconds"]["links"]
    saved = runs["gradient"] * waited * (1 - rows / most) if most > rows else 0.0
    yield Advice(f"train.rows_per_device={most}", saved, f"devices wait {waited:.2f} s of a microbatch for links")
