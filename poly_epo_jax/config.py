"""Checks a configuration before anything is built, so that a wrong value costs a sentence and not a run."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

MAX_SETS = 10**6  # per prompt


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key and what it may be."""


def check_config(config: ConfigDict, choices: Mapping[str, Collection[Any]]) -> None:
    """Refuses what no run could use.

    Args:
      choices: the values that each named key may take, by its dotted name.

    Raises:
      ConfigError: at the first key that is wrong.
    """
    for key, allowed in choices.items():
        value = _get(config, key)
        if value not in allowed:
            raise ConfigError(f"{key}={value!r} is unknown; choose one of {', '.join(map(str, sorted(allowed)))}.")
    for key in POSITIVE:
        _require(_get(config, key) > 0, config, key, "must be positive")
    for key in NOT_NEGATIVE:
        _require(_get(config, key) >= 0, config, key, "must not be negative")
    for key in FRACTIONS:
        _require(0 <= _get(config, key) <= 1, config, key, "must lie between 0 and 1")

    train, algo = config.train, config.algo
    _require(config.sampling.top_p > 0, config, "sampling.top_p", "must be above 0; 1 switches it off")
    _require(
        config.sampling.temperature > 0, config, "sampling.temperature", "must be positive, for training needs samples"
    )
    _require(
        algo.set_size < train.num_generations,
        config,
        "algo.set_size",
        f"must be smaller than train.num_generations={train.num_generations}",
    )
    all_sets = math.comb(train.num_generations, algo.set_size)
    _require(algo.num_sets <= all_sets, config, "algo.num_sets", f"must be at most C(N, n) = {all_sets}, or 0 for all")
    # The polychromic objective over all sets has a closed form; any other is scored set by set.
    if algo.objective != "polychromic" and not algo.num_sets:
        _require(all_sets <= MAX_SETS, config, "algo.num_sets", f"means all {all_sets} sets; draw some, e.g. 1000")
    _require(
        train.prompts_per_batch % train.prompts_per_minibatch == 0,
        config,
        "train.prompts_per_minibatch",
        f"must divide train.prompts_per_batch={train.prompts_per_batch}",
    )
    served = config.rollouts.name == "sglang"
    _require(not served or bool(config.rollouts.urls), config, "rollouts.urls", "must name a server of the policy")
    _require(config.judge.name != "llm" or bool(config.judge.url), config, "judge.url", "must name the judge's server")
    _require(
        not (config.rollouts.shared and train.staleness),
        config,
        "rollouts.shared",
        "would let one host change the servers' weights while others still generate with train.staleness=1; set one of "
        "the two back",
    )
    if train.staleness:
        _require(
            served,
            config,
            "rollouts.name",
            "shares the trainer's weights and devices and cannot generate while they train; set train.staleness=0, or "
            "rollouts.name=sglang",
        )
        _require(
            algo.old_logprobs == "sampler",
            config,
            "algo.old_logprobs",
            "would ignore that train.staleness=1 trains on the generations of an older policy; set it to 'sampler'",
        )
    longest = train.max_prompt_tokens + config.sampling.max_tokens
    _require(
        train.row_tokens >= longest,
        config,
        "train.row_tokens",
        f"must hold train.max_prompt_tokens + sampling.max_tokens = {longest} tokens",
    )


def microbatch_rows(config: ConfigDict, mesh_shape: Mapping[str, int]) -> int:
    """Rows whose gradient is taken at once on all devices of a mesh: its data and fsdp axes split them."""
    return config.train.rows_per_device * mesh_shape["data"] * mesh_shape["fsdp"]


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the keys in which two configurations differ."""
    names = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            names += changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            names.append(prefix + key)
    return names


POSITIVE = (
    "sampling.max_tokens",
    "train.num_steps",
    "train.prompts_per_batch",
    "train.prompts_per_minibatch",
    "train.num_generations",
    "train.max_prompt_tokens",
    "train.rows_per_device",
    "algo.set_size",
    "rollouts.max_concurrent",
    "rollouts.tensor_parallel",
    "rollouts.timeout_seconds",
    "judge.max_tokens",
    "judge.max_response_chars",
    "judge.attempts",
    "judge.timeout_seconds",
    "judge.max_concurrent",
    "algo.importance_cap",
    "optimizer.learning_rate",
    "optimizer.max_grad_norm",
    "checkpoint.every",
    "checkpoint.keep",
    "eval.num_problems",
    "eval.num_generations",
    "log.generations_every",
    "model.scan_unroll",
    "base.hidden_size",
    "base.mlp_size",
    "base.num_layers",
    "base.num_heads",
    "base.num_kv_heads",
    "base.head_dim",
    "base.batch_size",
    "base.clean_steps",
    "base.clean_learning_rate",
    "base.noisy_learning_rate",
)
NOT_NEGATIVE = (
    "mesh.devices",
    "sampling.top_k",
    "rollouts.wait_seconds",
    "judge.temperature",
    "judge.wait_seconds",
    "algo.num_sets",
    "algo.div_coef",
    "algo.clip_low",
    "algo.clip_high",
    "algo.kl_coef",
    "algo.entropy_coef",
    "optimizer.warmup_updates",
    "optimizer.weight_decay",
    "eval.every",
    "base.noisy_steps",
)
FRACTIONS = ("sampling.top_p", "optimizer.final_fraction", "judge.max_failed_share")


def _get(config: ConfigDict, key: str) -> Any:
    value = config
    for part in key.split("."):
        value = value[part]
    return value


def _require(holds: bool, config: ConfigDict, key: str, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={_get(config, key)!r} {rule}.")
