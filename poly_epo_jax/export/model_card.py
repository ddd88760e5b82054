"""Builds the model card of an exported policy: base model, data, settings, results, command. Does not require JAX."""

import functools
import html
import json
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.section import changed_keys
from poly_epo_jax.metrics.logged import describe, is_held_out
from poly_epo_jax.records.run_folder import METRICS, read_about, read_config, read_method, read_rows
from poly_epo_jax.report.document import markdown_table

FOLDERS = ("workdir", "compilation_cache_dir", "base.cache_dir", "rollouts.weights_dir")
"""Configuration keys of storage locations, which do not affect the policy and are omitted from the command."""
_TAGS = ("poly_epo_jax", "reinforcement-learning", "set-rl")


def model_card(run: Path, step: int, stop_strings: Sequence[str] = ()) -> str:
    """Returns the model card of a checkpoint as Markdown, with the metadata of the Hugging Face hub.

    Args:
      run: The run folder.
      step: Step of the checkpoint.
      stop_strings: Stop strings that are not end-of-sequence tokens of the model folder.

    Raises:
      OSError, ValueError: If config.json or about.json is missing or invalid, or if metrics.jsonl is corrupted.
    """
    config = read_config(run)
    # The folder may come from another person. Its texts must not add lines or HTML to the card.
    base, task, method = (
        " ".join(html.escape(str(text), quote=False).split())
        for text in (config["model"]["path"], config["task"]["name"], read_method(run))
    )
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
        f"from {origin}. This is the policy after step {step} of {train['num_steps']}. Each step used "
        f"{train['prompts_per_batch']} prompts with {train['num_generations']} responses each. The license of the base "
        "model, if any, also applies to this model.",
        "",
        "## Data and settings",
        "",
        *(html.escape(line, quote=False) for line in markdown_table(("setting", "value"), _settings(config))),
        "",
        *_stop_strings(stop_strings),
        *_results(read_rows(run / METRICS), step),
        "## Training command",
        "",
        "Run this command in a checkout of poly_epo_jax to reproduce the training. Paths of weights and data files "
        "refer to the machine on which the policy was trained. If the run uses custom components, such as an "
        "objective, replace `config/default.py` with the configuration file that registers them.",
        "",
        "```bash",
        command(config),
        "```",
        "",
        *_versions(read_about(run).get("versions", [])),
    ]
    return "\n".join(lines).rstrip() + "\n"


def command(config: Mapping[str, Any]) -> str:
    """Returns a command that trains with this configuration, apart from `FOLDERS`.

    The command uses the default configuration, and sets all keys that differ from it.
    """
    changed = changed_keys(json.loads(json.dumps(Config().to_dict())), config)
    values = {key: functools.reduce(operator.getitem, key.split("."), config) for key in changed if key not in FOLDERS}
    flags = [shlex.quote(f"--config.{key}={_flag_value(key, value)}") for key, value in values.items()]
    return " \\\n    ".join(["python -m poly_epo_jax.main", "--config=poly_epo_jax/config/default.py", *flags])


def _flag_value(key: str, value: Any) -> str:
    """Formats a value for the command line: lists as tuples, because JSON has no tuples, and options as literals."""
    if "options." in key:
        return repr(value)
    return repr(tuple(value)) if isinstance(value, list) else str(value)


def _settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    algo, train, optimizer, sampling = (config[name] for name in ("algo", "train", "optimizer", "sampling"))
    shown = {
        "task": config["task"]["name"],
        **{f"task.options.{name}": value for name, value in config["task"]["options"].items()},
        "judge": f"judge.name={config['judge']['name']}",
        "estimator, objective": f"{algo['advantages']}, {algo['objective']}",
        "sets": f"n = {algo['set_size']} of N = {train['num_generations']}, K = {algo['num_sets'] or 'all'}",
        "loss": f"{algo['loss']}, clip {algo['clip_low']:g} and {algo['clip_high']:g}, KL {algo['kl_coef']:g}, "
        f"entropy {algo['entropy_coef']:g}, length normalization {algo['length_normalization']}",
        "truncated responses": algo["truncated"],
        "optimizer": f"AdamW, learning rate {optimizer['learning_rate']:g} ({optimizer['schedule']}), maximum "
        f"gradient norm {optimizer['max_grad_norm']:g}, {train['prompts_per_minibatch']} prompts per update",
        "lengths": f"prompts up to {train['max_prompt_tokens']} tokens, responses up to {sampling['max_tokens']}",
        "temperature": f"{sampling['temperature']:g}",
        "seed": str(config["seed"]),
    }
    return [(name, f"`{value}`" if name.startswith("task.options") else str(value)) for name, value in shown.items()]


def _stop_strings(strings: Sequence[str]) -> list[str]:
    """Returns the section about stop strings that are not end-of-sequence tokens of the model folder."""
    if not strings:
        return []
    listed = json.dumps(list(strings), ensure_ascii=False)
    return [
        "## Stop strings",
        "",
        f"In training, a response ended at the first token that contains one of the strings `{listed}`. These files do "
        "not contain the strings: set them as `stop` in requests to SGLang or vLLM, or as `stop_strings`, with "
        "`tokenizer`, in `model.generate` of transformers.",
        "",
    ]


def _results(rows: list[dict[str, Any]], step: int) -> list[str]:
    """Returns a section with held-out metrics at the first evaluation and the last one up to `step`, if any."""
    evaluated = [row for row in rows if row["step"] <= step and any(map(is_held_out, row))]
    if not evaluated:
        return []
    first, last = evaluated[0], evaluated[-1]
    names = [name for name in last if is_held_out(name) and last[name] is not None]
    columns = {f"step {row['step']}": row for row in (first, last)}
    cells = [
        (describe(name).title, *("" if row.get(name) is None else f"{row[name]:.4g}" for row in columns.values()))
        for name in names
    ]
    heading = ["## Results on held-out problems", "", "Means over held-out problems, at the training temperature.", ""]
    return [*heading, *markdown_table(("metric", *columns), cells), ""]


def _versions(versions: list[Mapping[str, str]]) -> list[str]:
    if not versions:
        return []
    names = list(dict.fromkeys(name for one in versions for name in one))
    return ["## Versions", "", *markdown_table(names, [[one.get(name, "") for name in names] for one in versions])]
