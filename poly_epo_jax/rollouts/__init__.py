"""Where generations come from: a name to a constructor each."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.config import Config
from poly_epo_jax.model.qwen3 import Qwen3
from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedRollouts
from poly_epo_jax.rollouts.sglang.client import SGLangRollouts
from poly_epo_jax.rollouts.sglang.served_weights import ServedWeights
from poly_epo_jax.rollouts.sglang.weight_sync import DiskSync, TensorSync
from poly_epo_jax.types import Rollouts

WEIGHT_SYNCS = ("disk", "tensor")


def _embedded(
    model: Qwen3, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], config: Config
) -> EmbeddedRollouts:
    limits = config.train.max_prompt_tokens, config.rollouts.max_concurrent
    return EmbeddedRollouts(model, mesh, tokenizer, stop_ids, *limits)


def _jetstream(
    model: Qwen3, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], config: Config
) -> Rollouts:
    from poly_epo_jax.rollouts.jetstream.engine import EngineSize
    from poly_epo_jax.rollouts.jetstream.sampler import JetStreamRollouts  # google-jetstream need not be installed

    samples = config.train.num_generations
    slots = max(1, config.rollouts.max_concurrent // samples)
    size = EngineSize(slots, samples, config.train.max_prompt_tokens, config.sampling.max_tokens)
    return JetStreamRollouts(model, mesh, tokenizer, stop_ids, size)


def _sglang(
    model: Qwen3, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], config: Config
) -> SGLangRollouts:
    section, limits, longest = config.rollouts, served_limits(config), config.train.max_prompt_tokens
    if section.shared and not hosts.is_first():
        sync = None
    elif section.weight_sync == "disk":
        run = f"{Path(config.workdir).absolute()} {hosts.index()}"
        sync = DiskSync(Path(section.weights_dir), run, model.config, section.weights_dtype)
    else:
        sync = TensorSync(model.config, section.weights_dtype, section.tensor_parallel)
    weights = ServedWeights(sync, longest, section.timeout_seconds, section.wait_seconds)
    urls = [url.strip() for url in section.urls.split(",") if url.strip()]
    return SGLangRollouts(urls, weights, tokenizer, stop_ids, max_prompt_tokens=longest, **limits)


def served_limits(config: Config) -> dict[str, Any]:
    """How much and how long servers are asked, as keyword arguments of SGLangRollouts."""
    return {name: config.rollouts[name] for name in ("max_concurrent", "timeout_seconds", "wait_seconds")}


ROLLOUTS: dict[str, Callable[[Qwen3, Mesh, PreTrainedTokenizerBase, Sequence[int], Config], Rollouts]] = {
    "embedded": _embedded,
    "jetstream": _jetstream,
    "sglang": _sglang,
}
