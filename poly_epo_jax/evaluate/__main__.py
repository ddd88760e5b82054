"""Evaluates and compares models on benchmarks. Generates once per model and benchmark for all metrics.

    python -m poly_epo_jax.evaluate --config=configs/polynomial.py --benchmarks=polynomial \\
        --models=poly_epo=runs/polynomial-poly_epo,grpo=runs/polynomial-grpo --num_generations=64 \\
        --output=runs/evaluation
    python -m poly_epo_jax.report runs/evaluation

A model is a run folder (its newest checkpoint), a Hugging Face folder or name, or the URL of an SGLang server (of a
vLLM server with --config.rollouts.name=vllm). A benchmark is a key of benchmarks.BENCHMARKS, a synthetic task, or a
file. The prefix `label=` sets the label of a model or benchmark in tables. The configuration defines the sampling
parameters, the judge and the options of the synthetic task. Rerun the command to resume an interrupted evaluation. If
problems failed, the results omit them, the exit code is 3, and rerunning the command only generates these problems.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from poly_epo_jax.config.checks import URL, validate
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.evaluate.benchmarks import (
    Benchmark,
    about_evaluation,
    benchmark_label,
    check_benchmark,
    label_of,
    open_benchmark,
    split_label,
)
from poly_epo_jax.evaluate.draw import draw_generations
from poly_epo_jax.evaluate.folder import RESULTS, open_folder
from poly_epo_jax.evaluate.models import Model, open_model
from poly_epo_jax.evaluate.results import INTERVALS, compute_results
from poly_epo_jax.judges import JUDGES, NoJudge, judge_identity
from poly_epo_jax.judges.capacity import warn_capacity
from poly_epo_jax.metrics.evaluation import omissions, table_columns
from poly_epo_jax.metrics.intervals import interval_text
from poly_epo_jax.model.attention.self_check import CHECKED, verify_attention_kernel
from poly_epo_jax.model.policy import check_stop_ids
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.progress import progress_bar
from poly_epo_jax.registry import Range
from poly_epo_jax.rollouts import open_server
from poly_epo_jax.rollouts.between_turns import warn_about_turns
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedSampler
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.startup.command_line import config_parser, parse_value, run_command
from poly_epo_jax.startup.prepare import check_writable, configure_compiler
from poly_epo_jax.startup.read_config import check_judge_limit, make_judge, refuse_passwords
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.system.output_folder import LOCK, check_output, claim_folder, user_path
from poly_epo_jax.tasks.problems import Cleaned, reasons_text
from poly_epo_jax.types import Interactive, Judge, JudgeLoad, Sampling

PROBLEMS_FAILED = 3
"""Exit code of an evaluation in which problems failed. All other problems are evaluated."""
MAX_PRINTED = 20  # maximum number of printed problems that failed


def run_evaluation(config: Config, flags: argparse.Namespace) -> None:
    """Generates the missing responses of each model on each benchmark, and prints the results.

    Args:
      config: The configuration.
      flags: Parsed command-line flags of this command.

    Raises:
      SystemExit: If the environment, reward or server failed on some problems, with the code `PROBLEMS_FAILED`.
      ValueError, OSError: If a model or benchmark is not found, or a server does not respond at the start.
    """
    _check_flags(config, flags)
    configure_compiler(config)
    mesh = make_mesh(**config.mesh)
    models = {}
    for label, model in (open_model(name, config, mesh) for name in flags.models):
        models[label] = model
        if model.params is not None:
            verify_attention_kernel(
                config.model.attention, model.policy.config, mesh, Path(config.compilation_cache_dir) / CHECKED
            )
    num_generations, found, failures = flags.num_generations, [], []
    sampling = Sampling(**config.sampling, seed=config.seed)
    judged = flags.cluster and JUDGES[config.judge.name].clusters
    for name in flags.benchmarks:
        benchmark = open_benchmark(name, config.task)
        digests = benchmark.digests
        if isinstance(benchmark.task, Cleaned) and (reasons := reasons_text(benchmark.task.dropped["train"])):
            print(f"{benchmark.label}: {len(benchmark.problems)} problems; dropped: {reasons}.")
        benchmark.problems = benchmark.problems[: flags.max_problems or None]
        if not benchmark.problems:
            raise ConfigError(
                f"--benchmarks={name} contains no problems; choose another benchmark, or increase "
                "task.options.num_held_out."
            )
        judge = make_judge(config.judge, benchmark.task) if judged else NoJudge()
        digests |= asyncio.run(judge_identity(judge))
        for label, model in models.items():
            folder = flags.output / benchmark.label / label
            about = about_evaluation(config, name, model.weights, num_generations, judged, digests | model.digests)
            with claim_folder(folder, "evaluation"):
                open_folder(folder, about)
                rollouts = _open_rollouts(model, benchmark, config, mesh)
                try:
                    failed = asyncio.run(
                        _draw_missing(folder, model, rollouts, benchmark, judge, sampling, num_generations)
                    )
                finally:
                    rollouts.sampler.close()
                failures += [f"{folder}: {problem} failed: {reason}" for problem, reason in failed.items()]
                if len(failed) < len(benchmark.problems):
                    about = {key: about[key] for key in ("sampling", "digests")} | {"failed": failed}
                    about |= compute_results(folder, config.rollouts.grading_timeout_seconds)
                    found.append({"benchmark": benchmark.label, "model": label} | about)
                    write_json(folder / RESULTS, found[-1])
    _print_results(found, num_generations, flags.output)
    if failures:
        print(*failures[:MAX_PRINTED], sep="\n", file=sys.stderr)
        print(f"{len(failures)} problems failed. Rerun the command to generate only these problems.", file=sys.stderr)
        sys.exit(PROBLEMS_FAILED)


def _print_results(found: Sequence[dict[str, Any]], num_generations: int, output: Path) -> None:
    for benchmark in dict.fromkeys(one["benchmark"] for one in found):
        shown = [one for one in found if one["benchmark"] == benchmark]
        Console(markup=False).print(_table(shown, num_generations))
        if note := omissions(shown):
            print(note)
    if found:
        print(f"{INTERVALS}.\nCreate a report: python -m poly_epo_jax.report {output}", flush=True)


async def _draw_missing(
    folder: Path,
    model: Model,
    rollouts: Rollouts,
    benchmark: Benchmark,
    judge: Judge,
    sampling: Sampling,
    num_generations: int,
) -> dict[str, str]:
    num_turns = sampling.max_turns if isinstance(benchmark.task, Interactive) else 1
    await warn_capacity(judge, JudgeLoad(num_generations, rollouts.max_prompt_tokens, sampling.max_tokens, num_turns))
    if model.params is not None:
        await rollouts.push_weights(model.params, 0)
    with progress_bar(f"{folder.name} on {benchmark.label}: problems", len(benchmark.problems)) as show:
        return await draw_generations(folder, rollouts, benchmark, judge, num_generations, sampling, show)


def _table(results: Sequence[dict[str, Any]], num_generations: int) -> Table:
    """Returns a table of the results on one benchmark: a row for each metric and model, within 80 columns.

    Args:
      results: Results of each model on the benchmark.
      num_generations: Number of generations per problem.
    """
    title = f"{results[0]['benchmark']}: {results[0]['num_problems']} problems, {num_generations} generations each"
    table = Table("metric", "model", "mean [95% interval]", title=title)
    for name, metric in table_columns((name for one in results for name in one["metrics"]), "evaluate").items():
        for one in results:
            if name in one["metrics"]:
                table.add_row(metric.title, one["model"], interval_text(one["metrics"][name], metric.digits))
        table.add_section()
    return table


def _check_flags(config: Config, flags: argparse.Namespace) -> None:
    validate(flags.num_generations, "--num_generations", Range(1, 4096))
    validate(flags.max_problems, "--max_problems", Range(0, 10**9))
    refuse_passwords({"--models": flags.models})  # must run before any error message that contains a model
    if config.sampling.correlated:
        raise ConfigError(
            "sampling.correlated=True is not supported in evaluations, because pass@k and its intervals assume "
            "independent samples; set sampling.correlated=False."
        )
    for flag, given, make_label in (
        ("--models", flags.models, label_of),
        ("--benchmarks", flags.benchmarks, benchmark_label),
    ):
        if not any(given):
            raise ConfigError(f"{flag} is empty; set it to a comma-separated list of at least one name.")
        labels = [make_label(name) for name in given]
        for label in labels:
            if "/" in label or label in ("", ".", "..") or labels.count(label) > 1:
                raise ConfigError(
                    f"{flag}={','.join(given)} contains the label {label!r}, which is a duplicate or not a valid "
                    "folder name; set unique labels with label=name."
                )
    for name in flags.benchmarks:
        check_benchmark(name)
    for name in flags.models:
        source = split_label(name)[1]
        if source.startswith(("http://", "https://")):
            validate(source, "--models", URL)
    check_writable("--output", flags.output)
    check_output(flags.output, "evaluation", is_known=any(flags.output.glob(f"*/*/{LOCK}")))
    if flags.cluster:
        check_judge_limit(config.judge, "--num_generations", flags.num_generations)


def _open_rollouts(model: Model, benchmark: Benchmark, config: Config, mesh: Mesh) -> Rollouts:
    """Creates the sampler. The prompt length is not limited, so that all problems of a benchmark are evaluated."""
    policy = model.policy
    check_stop_ids(policy)
    longest = max(map(len, encode_prompts(policy.tokenizer, benchmark.problems, policy.config.vocab_size)))
    if model.url:
        sampler = open_server(model.url, policy.model, policy.stop_ids, config, model.weights)
    else:
        sampler = EmbeddedSampler(policy.model, mesh, policy.stop_ids, longest, config.rollouts.max_concurrent)
    warn_about_turns(policy.tokenizer, policy.stop_ids, benchmark.task, benchmark.problems)
    limits = (longest, config.model.stop_strings, policy.config.vocab_size, *config.rollouts.user_code_limits)
    return Rollouts(sampler, policy.tokenizer, benchmark.task, *limits, omits_failed_requests=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (`sys.argv` if None) and returns the exit code."""
    parser = config_parser(__doc__)
    several = {"type": lambda text: [*map(str.strip, text.split(","))], "default": [], "metavar": "LABEL=NAME,..."}
    parser.add_argument(
        "--models", **several, help="run folders, Hugging Face folders or names, or server URLs, with optional labels"
    )
    parser.add_argument(
        "--benchmarks", **several, help="benchmark names, synthetic tasks or files, with optional labels"
    )
    parser.add_argument(
        "--num_generations", type=int, default=16, metavar="N", help="number of generations per problem (default: 16)"
    )
    parser.add_argument(
        "--max_problems", type=int, default=0, metavar="N", help="maximum number of problems per benchmark (0 = all)"
    )
    parser.add_argument(
        "--cluster",
        nargs="?",
        const=True,
        type=lambda text: parse_value(text, bool),
        choices=(True, False),
        default=True,
        help="whether the judge clusters the generations (default: true)",
    )
    parser.add_argument(
        "--output",
        type=user_path,
        default=Path("runs/evaluation"),
        metavar="FOLDER",
        help="output folder of the evaluation (default: runs/evaluation)",
    )
    return run_command(parser, arguments, run_evaluation, training=False)


if __name__ == "__main__":
    sys.exit(main())
