"""Evaluates models side by side, with the paper's estimators, from one sampling pass per model and benchmark.

    python -m poly_epo_jax.evaluate --config=configs/polynomial.py --benchmarks=polynomial \
        --models=poly_epo=runs/polynomial-poly_epo,grpo=runs/polynomial-grpo --samples=64 --output=runs/evaluation
    python -m poly_epo_jax.report runs/evaluation

A model is a run folder (its newest checkpoint), a Hugging Face folder or name, or the URL of an SGLang server; a
benchmark a name of benchmarks.BENCHMARKS, a synthetic task, or a file. `label=` before either names it in the tables.
Sampling, judge and the synthetic task are those of the configuration. Repeated, the command goes on where it ended.
"""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
from absl import app, flags, logging
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from poly_epo_jax.command_line import CONFIG, parse_flags
from poly_epo_jax.config import ConfigError
from poly_epo_jax.evaluation.benchmarks import Benchmark, open_benchmark
from poly_epo_jax.evaluation.samples import RESULTS, draw_samples, open_folder, results
from poly_epo_jax.http_client import ServerError, describe
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.model.sharding import make_mesh
from poly_epo_jax.policy import Policy, find_model, open_policy
from poly_epo_jax.rollouts import served_limits
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedRollouts
from poly_epo_jax.rollouts.sglang.client import SGLangRollouts
from poly_epo_jax.rollouts.sglang.endpoints import served_model
from poly_epo_jax.trained_policy import open_trained_policy
from poly_epo_jax.types import Group, Judge, JudgeFailure, Params, Problem, Rollouts, Sampling, Served

MODELS = flags.DEFINE_list("models", [], "Run folders, Hugging Face folders or names, server URLs; label= names one.")
BENCHMARKS = flags.DEFINE_list("benchmarks", [], "Names, synthetic tasks or files; label= names one.")
SAMPLES = flags.DEFINE_integer("samples", 16, "Samples per problem.", lower_bound=1)
MAX_PROBLEMS = flags.DEFINE_integer("max_problems", 0, "The first so many problems of each benchmark; 0: all.", 0)
JUDGED = flags.DEFINE_bool("judge", True, "Whether to cluster the samples with the configuration's judge.")
OUTPUT = flags.DEFINE_string("output", "runs/evaluation", "Where the evaluation is kept.")
SHOWN = {
    "pass@1": "pass@1",
    "pass@{m}": "pass@{m}",
    "majority_accuracy@{m}": "majority@{m}",
    "majority_share@{m}": "vote share",
    "correct_clusters@{k}": "correct clusters of {k}",
}


@dataclasses.dataclass
class Model:
    """A model to evaluate: behind `url`, or `params` of a policy to sample from here; and which weights these are."""

    policy: Policy
    weights: str
    url: str = ""
    params: Params | None = None


class Unjudged:
    """The judge of an evaluation without clusters."""

    async def cluster(self, group: Group) -> JudgeFailure:
        return JudgeFailure("unjudged", "The evaluation was made with --judge=false.")


def run(config: ConfigDict) -> None:
    """Draws what is missing of every model's samples of every benchmark, and shows the results.

    Raises:
      ValueError, OSError: a model or benchmark cannot be had, or a server fails; what has been drawn is kept.
    """
    for flag in (MODELS, BENCHMARKS):
        if not flag.value:
            raise ConfigError(f"--{flag.name} is missing; name at least one, commas between several.")
    mesh = make_mesh(**config.mesh)
    models = {}
    for name in MODELS.value:
        label, model = _open_model(name, config, mesh)
        models[label] = model
    table = Table(title=f"{SAMPLES.value} samples per problem; 95% intervals over problems")
    # Of the powers of two, for which majorities and clusters are counted, the largest and 8.
    sizes = {"m": 2 ** (SAMPLES.value.bit_length() - 1), "k": min(8, 2 ** (SAMPLES.value.bit_length() - 1))}
    shown = {metric.format(**sizes): title.format(**sizes) for metric, title in SHOWN.items()}
    for column in ("benchmark", "model", *shown.values()):
        table.add_column(column)
    sampling = Sampling(**config.sampling, seed=config.seed)
    for name in BENCHMARKS.value:
        benchmark = open_benchmark(name, config)
        benchmark.problems = benchmark.problems[: MAX_PROBLEMS.value or None]
        judge = JUDGES[config.judge.name](benchmark.task, config.judge) if JUDGED.value else Unjudged()
        for label, model in models.items():
            folder = Path(OUTPUT.value) / benchmark.label / label
            about = {"benchmark": name, "model": model.weights, "samples": SAMPLES.value}
            about |= {"sampling": dataclasses.asdict(sampling), "judge": config.judge.name if JUDGED.value else None}
            open_folder(folder, about)
            rollouts = _open_rollouts(model, benchmark.problems, config, mesh)
            try:
                asyncio.run(_draw(folder, model, rollouts, benchmark, judge, sampling))
            finally:
                rollouts.close()
            labels = {"benchmark": benchmark.label, "model": label, "sampling": about["sampling"]}
            found = labels | results(folder)
            (folder / RESULTS).write_text(json.dumps(found, indent=1) + "\n")
            table.add_row(benchmark.label, label, *(_cell(found["metrics"].get(metric)) for metric in shown))
    Console().print(table)
    print(f"See it with: python -m poly_epo_jax.report {OUTPUT.value}")


async def _draw(
    folder: Path, model: Model, rollouts: Rollouts, benchmark: Benchmark, judge: Judge, sampling: Sampling
) -> None:
    if isinstance(judge, Served):
        await judge.wait_until_ready()
    if model.params is not None:
        await rollouts.update_weights(model.params, 0)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn()) as progress:
        bar = progress.add_task(f"{folder.name} on {benchmark.label}", total=len(benchmark.problems))

        def show(done: int) -> None:
            progress.update(bar, completed=done)

        problems = benchmark.problems
        await draw_samples(folder, rollouts, benchmark.task, judge, problems, SAMPLES.value, sampling, show)


def _cell(metric: dict[str, float | None] | None) -> str:
    if metric is None:
        return "-"
    interval = "" if metric["low"] is None else f" [{metric['low']:.3f}, {metric['high']:.3f}]"
    return f"{metric['mean']:.3f}{interval}"


def _open_model(name: str, config: ConfigDict, mesh: Mesh) -> tuple[str, Model]:
    label, _, source = name.rpartition("=") if "=" in name else ("", "", name)
    label = label or source.rstrip("/").split("/")[-1]
    if source.startswith(("http://", "https://")):
        url = source.rstrip("/")
        try:
            info = asyncio.run(served_model(url))
        except httpx.HTTPError as error:
            raise ServerError(
                f"{url} does not say what it serves ({describe(error)}); start an SGLang or sglang-jax server."
            ) from error
        policy = open_policy(find_model(info["tokenizer_path"]), config.model)
        return label, Model(policy, f"{info['model_path']} {info.get('weight_version', '')}".strip(), url=url)
    if not (Path(source) / "checkpoints").is_dir():
        policy = open_policy(find_model(source), config.model)
        return label, Model(policy, source, params=policy.load_params(mesh))
    policy, params, step = open_trained_policy(Path(source), config.model, mesh)
    return label, Model(policy, f"{source} step {step}", params=params)


def _open_rollouts(model: Model, problems: Sequence[Problem], config: ConfigDict, mesh: Mesh) -> Rollouts:
    """Prompts of any length are taken, as a benchmark is not to be cut."""
    policy = model.policy
    encoded = policy.tokenizer([problem.prompt for problem in problems], add_special_tokens=False)["input_ids"]
    longest = max(map(len, encoded))
    if model.url:
        limits = served_limits(config)
        return SGLangRollouts([model.url], None, policy.tokenizer, policy.stop_ids, max_prompt_tokens=longest, **limits)
    return EmbeddedRollouts(
        policy.model, mesh, policy.tokenizer, policy.stop_ids, longest, config.rollouts.max_concurrent
    )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Error: unknown argument {argv[1]}; see python -m poly_epo_jax.evaluate --helpshort.")
    try:
        logging.set_verbosity(logging.WARNING)
        run(CONFIG.value)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"Error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
