"""Creates the runs of a study, and validates all of their configurations before the first run starts."""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.keys import Config
from poly_epo_jax.evaluate.benchmarks import about_evaluation, benchmark_label, check_benchmark, has_held_out_problems
from poly_epo_jax.evaluate.folder import ABOUT, RESULTS
from poly_epo_jax.records import run_folder
from poly_epo_jax.startup.command_line import read_arguments
from poly_epo_jax.startup.read_config import check_judge_limit
from poly_epo_jax.startup.resume_checks import check_resume_config, check_same_content, input_digests
from poly_epo_jax.startup.trained_policy import run_digests
from poly_epo_jax.study.folder import EVALUATION, PLAN, RunKey, run_state
from poly_epo_jax.study.spec import RATE, SEED, STUDY_KEYS, WORKDIR, Changes, Evaluation, Study
from poly_epo_jax.system.json_files import read_object, write_json


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """A planned run of a study.

    Attributes:
      key: Task, method, learning rate and seed.
      folder: The run folder.
      arguments: Command-line arguments of the configuration.
      config: The configuration.
      evaluation: Evaluation of the finished run. None if it is not evaluated.
      keep_weights: Whether checkpoints are kept after the run is finished and evaluated.
    """

    key: RunKey
    folder: Path
    arguments: list[str]
    config: Config
    evaluation: Evaluation | None
    keep_weights: bool

    @property
    def train_command(self) -> list[str]:
        """Arguments of `python -m` that train the run."""
        return ["poly_epo_jax.main", *self.arguments]

    @property
    def evaluate_command(self) -> list[str]:
        """Arguments of `python -m` that evaluate the run. The study folder is two levels above the run folder."""
        assert self.evaluation is not None
        return [
            "poly_epo_jax.evaluate",
            *self.arguments,
            "--config.sampling.correlated=False",  # pass@k assumes independence
            f"--benchmarks={','.join(self.benchmarks)}",
            f"--models={self.key.label}={self.folder}",
            f"--num_generations={self.evaluation.num_generations}",
            f"--cluster={str(self.evaluation.judge).lower()}",
            f"--output={self.folder.parent.parent / EVALUATION}",
        ]

    @property
    def benchmarks(self) -> Sequence[str]:
        """Benchmarks of the evaluation, by default the held-out problems of the task."""
        assert self.evaluation is not None
        return self.evaluation.benchmarks or (self.config.task.name,)

    def is_trained(self) -> bool:
        """Returns True if the run is finished with this configuration."""
        config = json.loads(json.dumps(self.config.to_dict()))
        return run_state(self.folder).is_finished and run_folder.read_config(self.folder) == config

    def is_evaluated(self) -> bool:
        """Returns True if the evaluation of the final weights exists with these settings, or if none is requested.

        The weights (unless their checkpoint was emptied) and the files that options name are compared by their content.
        Only the evaluation command compares the problems and the model that the judge's server lists.
        """
        if self.evaluation is None:
            return True
        step, number, judged = self.config.train.num_steps, self.evaluation.num_generations, self.evaluation.judge
        weights, digests = f"{self.folder} step {step}", run_digests(self.folder, step)
        for benchmark in self.benchmarks:
            expected = about_evaluation(self.config, benchmark, weights, number, judged, digests)
            folder = self.folder.parent.parent / EVALUATION / benchmark_label(benchmark) / self.key.label
            if not (folder / RESULTS).exists() or read_object(folder / RESULTS, "delete the folder").get("failed"):
                return False
            saved = read_object(folder / ABOUT, "delete the folder")
            expected["digests"] = saved.get("digests", {}) | expected["digests"]
            if saved != expected:
                return False
        return True

    def drop_weights(self) -> None:
        """Empties the checkpoint folders. The folders themselves are kept, because they mark the run as finished."""
        for checkpoint in (self.folder / run_folder.CHECKPOINTS).iterdir():
            for path in checkpoint.iterdir() if checkpoint.is_dir() else ():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_runs(study: Study, overrides: Sequence[str] = ()) -> list[StudyRun]:
    """Creates the runs of a study.

    Runs are ordered by seed, so that an interrupted study has complete seeds, which can be compared.

    Args:
      study: The study, with its folder.
      overrides: Arguments --config.KEY=VALUE that apply to all runs.

    Raises:
      ConfigError: If an override sets a key that the study controls, a configuration is invalid, or a folder contains a
        run that cannot be resumed with its configuration. The message has a line for each distinct problem.
    """
    for override in overrides:
        key = override.partition("=")[0].removeprefix("--config.")
        if key in STUDY_KEYS:
            raise ConfigError(f"--config.{key} is controlled by {STUDY_KEYS[key]} of the study; change it there.")
    runs, errors = [], {}
    run_keys = [
        RunKey(task, method, float(rate), seed)
        for seed in study.seeds
        for task in study.tasks
        for rate in study.learning_rates
        for method in study.methods
    ]
    if len({run_key.label for run_key in run_keys}) < len(run_keys):
        raise ConfigError("Two runs of the study have the same name TASK-METHOD; rename a task or method.")
    for run_key in run_keys:
        folder = Path(study.folder) / run_key.path
        arguments = _arguments(study, run_key, folder, overrides)
        try:
            config = read_arguments(arguments)
            if config.hosts.coordinator_address:
                raise ConfigError(
                    "hosts.coordinator_address is not supported in a study, because each run is one process; unset it."
                )
            _check_evaluation(study.evaluation, config)
            check_resume_config(folder, config)
            check_same_content(folder, "A file that the configuration names", input_digests(config))
            runs.append(StudyRun(run_key, folder, arguments, config, study.evaluation, study.keep_weights))
        except (ValueError, OSError) as error:
            # Runs often share a problem. It is reported once, with the first run.
            errors.setdefault(" ".join(str(error).split()), run_key)
    if errors:
        raise ConfigError("\n".join(f"{run_key.path}: {text}" for text, run_key in errors.items()))
    return runs


def write_plan(study: Study, runs: Sequence[StudyRun]) -> None:
    """Writes study.json, from which reports read the runs and the baseline.

    Args:
      study: The study, with its folder.
      runs: All runs of the study.
    """
    write_json(
        Path(study.folder) / PLAN,
        {"baseline": study.resolved_baseline, "runs": [dataclasses.asdict(run.key) for run in runs]},
    )


def _check_evaluation(evaluation: Evaluation | None, config: Config) -> None:
    """Raises ConfigError if a finished run could not be evaluated."""
    if evaluation is None:
        return
    if not evaluation.benchmarks and not has_held_out_problems(config.task.name):
        raise ConfigError(
            f"evaluation.benchmarks is empty, but task.name={config.task.name} is not a benchmark; set it, for example "
            "to ['gsm8k'] or to the path of a .jsonl file."
        )
    for name in evaluation.benchmarks:
        check_benchmark(name)
    if evaluation.judge:
        check_judge_limit(config.judge, "evaluation.num_generations", evaluation.num_generations)


def _arguments(study: Study, run_key: RunKey, folder: Path, overrides: Sequence[str]) -> list[str]:
    """Returns the arguments of a run. Precedence: command line, method, task, `settings` of the study."""
    task = study.tasks[run_key.task]
    changes: dict[str, Any] = {**study.settings, **task.changes, **study.methods[run_key.method]}
    changes |= {RATE: run_key.rate, SEED: run_key.seed, WORKDIR: str(folder)}
    given = {override.partition("=")[0] for override in overrides}
    return [
        f"--config={task.config}",
        *(flag for flag in _flags(changes) if flag.partition("=")[0] not in given),
        *overrides,
    ]


def _flags(changes: Changes) -> list[str]:
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in changes.items()}
    return [f"--config.{key}={value if isinstance(value, str) else repr(value)}" for key, value in plain.items()]
