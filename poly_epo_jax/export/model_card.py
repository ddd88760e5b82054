"""The model card of an exported policy: its base model, data, settings, results and command. Needs no JAX."""

import functools
import json
import operator
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.section import changed_keys
from poly_epo_jax.metrics.logged import describe, is_held_out
from poly_epo_jax.records.run_folder import ABOUT, METRICS, read_config, read_method, read_rows
from poly_epo_jax.report.document import markdown_table

FOLDERS = ("workdir", "compilation_cache", "base.cache_dir", "rollouts.weights_dir")
"""Keys that say only where files were kept, which says nothing about the policy."""
_TAGS = ("poly_epo_jax", "reinforcement-learning", "set-rl")


def model_card(run: Path, step: int) -> str:
    """Markdown, with the metadata that the hub reads, for the policy at a run's checkpoint.

    Raises:
      OSError, ValueError: the run does not record how it was trained.
    """
    config, method = read_config(run), read_method(run)
    base, task = config["model"]["path"], config["task"]["name"]
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and not Path(base).is_dir()
    head = ["library_name: transformers", "pipeline_tag: text-generation"]
    head += [f"base_model: {base}"] * on_hub + ["tags:", *(f"- {tag}" for tag in _TAGS)]
    train, origin = config["train"], base or "a tiny policy fitted to the task's demonstrations"
    lines = [
        "---",
        *head,
        "---",
        "",
        f"# {method} on {task}",
        "",
        f"Trained by set reinforcement learning with poly_epo_jax, method {method}, "
        f"from {origin}: the policy after step {step} of {train['num_steps']}, each of {train['prompts_per_batch']} "
        f"prompts with {train['num_generations']} responses. Where the base model has a licence, it holds here too.",
        "",
        "## Data and settings",
        "",
        *markdown_table(("what", "value"), _settings(config)),
        "",
        *_results(read_rows(run / METRICS), step),
        "## The command",
        "",
        "It trains this policy again, from a checkout of poly_epo_jax. Where weights and data are files, the paths are "
        "those of the machine that it was trained on; where a part, such as an objective, is one's own, the file that "
        "registers it takes the place of `config/default.py`.",
        "",
        "```bash",
        command(config),
        "```",
        "",
        *_versions(json.loads((run / ABOUT).read_bytes()).get("versions", [])),
    ]
    return "\n".join(lines).rstrip() + "\n"


def command(config: Mapping[str, Any]) -> str:
    """A command that trains with this configuration: the default configuration, and every key that differs from it."""
    flags = ["--config=poly_epo_jax/config/default.py"]
    for key in changed_keys(json.loads(json.dumps(Config().to_dict())), config):
        if key not in FOLDERS:
            value = functools.reduce(operator.getitem, key.split("."), config)
            flags.append(shlex.quote(f"--config.{key}={_flag_value(key, value)}"))
    return " \\\n    ".join(["python -m poly_epo_jax.main", *flags])


def _flag_value(key: str, value: Any) -> str:
    """The value as the command line reads it: JSON has no tuples, and options have no declared type."""
    if "options." in key:
        return repr(value)
    return repr(tuple(value)) if isinstance(value, list) else str(value)


def _settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    algo, train, optimizer, sampling = (config[name] for name in ("algo", "train", "optimizer", "sampling"))
    shown = {
        "task": config["task"]["name"],
        **{f"task.options.{name}": value for name, value in config["task"]["options"].items()},
        "clusters": f"judge.name={config['judge']['name']}",
        "estimator, objective": f"{algo['advantages']}, {algo['objective']}",
        "sets": f"n = {algo['set_size']} of N = {train['num_generations']}, K = {algo['num_sets'] or 'all'}",
        "loss": f"{algo['loss']}, clip {algo['clip_low']:g} and {algo['clip_high']:g}, KL {algo['kl_coef']:g}, "
        f"entropy {algo['entropy_coef']:g}, length normalization {algo['length_normalization']}",
        "optimizer": f"AdamW, learning rate {optimizer['learning_rate']:g} ({optimizer['schedule']}), gradient norm at "
        f"most {optimizer['max_grad_norm']:g}, {train['prompts_per_minibatch']} prompts per update",
        "lengths": f"prompts to {train['max_prompt_tokens']} tokens, responses to {sampling['max_tokens']}",
        "temperature": f"{sampling['temperature']:g}",
        "seed": str(config["seed"]),
    }
    return [(name, f"`{value}`" if name.startswith("task.options") else str(value)) for name, value in shown.items()]


def _results(rows: list[dict[str, Any]], step: int) -> list[str]:
    """Held-out metrics at the first evaluation and at the last one up to this step; empty if there is none."""
    evaluated = [row for row in rows if row["step"] <= step and any(map(is_held_out, row))]
    if not evaluated:
        return []
    first, last = evaluated[0], evaluated[-1]
    names = [name for name in last if is_held_out(name) and last[name] is not None]
    columns = {f"step {row['step']}": row for row in (first, last)}
    cells = [(describe(name).title, *(_format_number(row.get(name)) for row in columns.values())) for name in names]
    heading = ["## Held-out problems", "", "Means over held-out problems, at the training temperature.", ""]
    return [*heading, *markdown_table(("metric", *columns), cells), ""]


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _versions(versions: list[Mapping[str, str]]) -> list[str]:
    if not versions:
        return []
    names = list(dict.fromkeys(name for one in versions for name in one))
    return ["## Versions", "", *markdown_table(names, [[one.get(name, "") for name in names] for one in versions])]
