"""Which settings may change when a run is resumed, and which would make it another run."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.keys import Config, changed_keys
from poly_epo_jax.model import hf
from poly_epo_jax.records import run_folder
from poly_epo_jax.step.optimizer import decays

RESUME_MAY_CHANGE = (  # except for the keys of `_bound`
    "workdir",
    "compilation_cache",
    "train.num_steps",
    "mesh.",
    "hosts.",
    "train.rows_per_device",
    "checkpoint.",
    "log.",
    "base.cache_dir",
    "model.path",
    "rollouts.",
    "judge.url",
    "judge.api_key_env",
    "judge.options.attempts",
    "judge.timeout_seconds",
    "judge.wait_seconds",
    "judge.max_concurrent",
    "judge.max_failed_share",
)


def check_same_run(workdir: Path, config: Config) -> None:
    """Refuses to resume a run under settings that would make it another run.

    Raises:
      ConfigError: naming the keys.
    """
    saved = run_folder.resumable_config(workdir)
    if saved is None:
        return
    new = json.loads(json.dumps(config.to_dict()))
    unknown = changed_keys(_names(saved), _names(new))
    if unknown:
        raise ConfigError(
            f"{workdir} holds a run of another version of poly_epo_jax, whose keys differ in {', '.join(unknown)}; "
            "resume it with that version, or set --config.workdir to a new folder."
        )
    bound = _bound(config)
    changed = [key for key in changed_keys(saved, new) if key in bound or not key.startswith(RESUME_MAY_CHANGE)]
    if changed:
        reasons = [f"{key} ({bound[key]})" if key in bound else key for key in changed]
        raise ConfigError(
            f"{workdir} holds a run with another {', '.join(reasons)}; set that back, set --config.workdir to a new "
            "folder, or delete that one."
        )


def check_same_model(workdir: Path, policy: Path) -> None:
    """Refuses to resume a run from a policy whose model has other shapes than the run's.

    Raises:
      ConfigError: naming them.
    """
    own = workdir / run_folder.POLICY
    if run_folder.resumable_config(workdir) is None or not own.is_dir():
        return
    shapes, others = (dataclasses.asdict(hf.read_config(folder)) for folder in (own, policy))
    if different := changed_keys(shapes, others):
        raise ConfigError(
            f"{workdir} holds a run of a model with another {', '.join(different)} than that in {policy}; set "
            "model.path to the run's own, or --config.workdir to a new folder."
        )


def _bound(config: Config) -> dict[str, str]:
    """Keys of RESUME_MAY_CHANGE that this run may not change, and why."""
    bound = {}
    if decays(config.optimizer):
        bound["train.num_steps"] = f"over which optimizer.schedule={config.optimizer.schedule} lowers the learning rate"
    if config.algo.kl_coef:
        bound["model.path"] = f"from whose policy algo.kl_coef={config.algo.kl_coef:g} measures the distance"
    return bound


def _names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a configuration and of its sections, without their values."""
    return {key: dict.fromkeys(value, key) if isinstance(value, dict) else key for key, value in config.items()}
