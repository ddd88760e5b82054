"""Evaluates models side by side, with the paper's estimators, from one pass of generations per model and benchmark.

    python -m poly_epo_jax.evaluate --config=configs/polynomial.py --benchmarks=polynomial \
        --models=poly_epo=runs/polynomial-poly_epo,grpo=runs/polynomial-grpo --num_generations=64 \
        --output=runs/evaluation
    python -m poly_epo_jax.report runs/evaluation

A model is a run folder (its newest checkpoint), a Hugging Face folder or name, or the URL of an SGLang server. A
benchmark is a name in benchmarks.BENCHMARKS, a synthetic task, or a file. `label=` before either names it in the
tables. Sampling, judge and synthetic task are those of the configuration. If the command is run again, it continues
where it stopped.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from absl import app, flags
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from poly_epo_jax.config.checks import URL, require
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.evaluate.benchmarks import Benchmark, about_evaluation, benchmark_label, label_of, open_benchmark
from poly_epo_jax.evaluate.draw import draw_generations
from poly_epo_jax.evaluate.folder import RESULTS, open_folder
from poly_epo_jax.evaluate.results import compute_results
from poly_epo_jax.judges import JUDGES, NoJudge
from poly_epo_jax.judges.llm import say_shortfalls
from poly_epo_jax.metrics.evaluation import EvaluationMetric, table_columns
from poly_epo_jax.model.attention.self_check import CHECKED, trust_attention
from poly_epo_jax.model.policy import Policy, find_model, open_policy
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.progress import counted
from poly_epo_jax.records.run_folder import CHECKPOINTS, LOCK
from poly_epo_jax.rollouts import open_server, open_weights, served_model
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.startup.command_line import parse_flags, run_command
from poly_epo_jax.startup.prepare import check_writable
from poly_epo_jax.startup.read_config import check_judge, make_judge, refuse_passwords
from poly_epo_jax.startup.trained_policy import open_trained_policy
from poly_epo_jax.system.file_lock import exclusive
from poly_epo_jax.system.http_client import ServerError, describe
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.types import Judge, JudgeLoad, Params, Sampling, Served

MODELS = flags.DEFINE_list("models", [], "Run folders, Hugging Face folders or names, server URLs; label= names one.")
BENCHMARKS = flags.DEFINE_list("benchmarks", [], "Names, synthetic tasks or files; label= names one.")
NUM_GENERATIONS = flags.DEFINE_integer("num_generations", 16, "Generations per problem.", 1, 4096)
MAX_PROBLEMS = flags.DEFINE_integer("max_problems", 0, "The first so many problems of each benchmark; 0: all.", 0)
JUDGED = flags.DEFINE_bool("judge", True, "Whether to cluster the generations with the configuration's judge.")
OUTPUT = flags.DEFINE_string("output", "runs/evaluation", "Where the evaluation is kept.")


@dataclasses.dataclass
class Model:
    """A model to evaluate: served at `url`, or `params` to sample from here. `weights` says which weights these are."""

    policy: Policy
    weights: str
    url: str = ""
    params: Params | None = None


def run(config: Config) -> None:
    """Draws the missing generations of every model on every benchmark, and shows the results.

    Raises:
      ValueError, OSError: a model or benchmark cannot be found, or a server fails; generations drawn so far are kept.
    """
    _check_flags(config)
    mesh = make_mesh(**config.mesh)
    models = {}
    for name in MODELS.value:
        label, model = _open_model(name, config, mesh)
        models[label] = model
        if model.params is not None:
            cache = Path(config.compilation_cache) / CHECKED
            trust_attention(config.model.attention, model.policy.config, mesh, cache)
    num_generations, found = NUM_GENERATIONS.value, []
    sampling = Sampling(**config.sampling, seed=config.seed)
    judged = JUDGED.value and JUDGES[config.judge.name].clusters
    for name in BENCHMARKS.value:
        benchmark = open_benchmark(name, config.task)
        benchmark.problems = benchmark.problems[: MAX_PROBLEMS.value or None]
        if not benchmark.problems:
            raise ConfigError(
                f"--benchmarks: {name} has no problems; choose another, or raise task.options.num_held_out."
            )
        judge = make_judge(config.judge, benchmark.task) if judged else NoJudge()
        for label, model in models.items():
            folder = Path(OUTPUT.value) / benchmark.label / label
            about = about_evaluation(config, name, model.weights, num_generations, judged)
            with exclusive(folder / LOCK, f"the evaluation {folder}"):
                open_folder(folder, about)
                rollouts = _open_rollouts(model, benchmark, config, mesh)
                try:
                    asyncio.run(_draw(folder, model, rollouts, benchmark, judge, sampling))
                finally:
                    rollouts.sampler.close()
                labels = {"benchmark": benchmark.label, "model": label, "sampling": about["sampling"]}
                results = labels | compute_results(folder)
                write_json(folder / RESULTS, results)
            found.append(results)
    Console().print(_table(found, f"{num_generations} generations per problem; 95% intervals over problems"))
    print(f"See it with: python -m poly_epo_jax.report {OUTPUT.value}")


async def _draw(
    folder: Path, model: Model, rollouts: Rollouts, benchmark: Benchmark, judge: Judge, sampling: Sampling
) -> None:
    if isinstance(judge, Served):
        await judge.wait_until_ready()
    load = JudgeLoad(NUM_GENERATIONS.value, rollouts.max_prompt_tokens, sampling.max_tokens)
    await say_shortfalls(judge, load)
    if model.params is not None:
        await rollouts.push_weights(model.params, 0)
    with counted(f"{folder.name} on {benchmark.label}: problems", len(benchmark.problems)) as show:
        await draw_generations(folder, rollouts, benchmark, judge, NUM_GENERATIONS.value, sampling, show)


def _table(results: Sequence[dict[str, Any]], title: str) -> Table:
    """Returns a table with a row for each model and benchmark."""
    columns = table_columns((name for one in results for name in one["metrics"]), "evaluate")
    table = Table("benchmark", "model", *(metric.title for metric in columns.values()), title=title)
    for one in results:
        cells = [_cell(metric, one["metrics"].get(name)) for name, metric in columns.items()]
        table.add_row(one["benchmark"], one["model"], *cells)
    return table


def _cell(metric: EvaluationMetric, value: dict[str, float | None] | None) -> str:
    if value is None:
        return "-"
    mean, low, high = ("" if end is None else metric.format(end) for end in value.values())
    return f"{mean} [{low}, {high}]" if low else mean


def _check_flags(config: Config) -> None:
    refuse_passwords({f"--{MODELS.name}": MODELS.value})  # before any of them is shown
    for flag, make_label in ((MODELS, label_of), (BENCHMARKS, benchmark_label)):
        names = [name.strip() for name in flag.value]
        if not any(names):
            raise ConfigError(f"--{flag.name} is missing; name at least one, commas between several.")
        labels = [make_label(name) for name in names]
        for label in labels:
            if "/" in label or label in ("", ".", "..") or labels.count(label) > 1:
                raise ConfigError(
                    f"--{flag.name}={','.join(names)} gives one of them the label {label!r}; write label=name, where "
                    "each label is another and can name a folder."
                )
    for name in MODELS.value:
        source = name.rpartition("=")[2]
        if source.startswith(("http://", "https://")):
            require(source, "--models", URL)
    check_writable("--output", Path(OUTPUT.value))
    if JUDGED.value:
        check_judge(config.judge, "--num_generations", NUM_GENERATIONS.value)


def _open_model(name: str, config: Config, mesh: Mesh) -> tuple[str, Model]:
    label, source = label_of(name), name.rpartition("=")[2]
    if source.startswith(("http://", "https://")):
        url = source.rstrip("/")
        try:
            served = asyncio.run(served_model(url))
        except httpx.HTTPError as error:
            raise ServerError(
                f"{url} does not say what it serves ({describe(error)}); start an SGLang or sglang-jax server."
            ) from error
        policy = open_policy(find_model(served.tokenizer_path), config.model)
        return label, Model(policy, f"{served.path} {served.weight_version}".strip(), url=url)
    if not (Path(source) / CHECKPOINTS).is_dir():
        policy = open_policy(find_model(source), config.model)
        return label, Model(policy, source, params=policy.load_params(mesh))
    policy, params, step = open_trained_policy(Path(source), config.model, mesh)
    return label, Model(policy, f"{source} step {step}", params=params)


def _open_rollouts(model: Model, benchmark: Benchmark, config: Config, mesh: Mesh) -> Rollouts:
    """Takes prompts of any length, because a benchmark must not lose problems."""
    policy = model.policy
    longest = max(map(len, encode_prompts(policy.tokenizer, benchmark.problems)))
    if model.url:
        sampler = open_server(model.url, policy.model, policy.stop_ids, config)
    else:
        sampler = open_weights(policy.model, mesh, policy.stop_ids, config, longest)
    return Rollouts(sampler, policy.tokenizer, benchmark.task, longest, config.model.stop_strings)


def main(argv: Sequence[str]) -> None:
    run_command(run, argv, training=False)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
