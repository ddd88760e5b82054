"""The run folder: names, row formats, reading and writing of its files. Does not require JAX.

    config.json          Full configuration of the run.
    about.json           {"method": "Poly-EPO", "remat": "full", "versions": [{"python": "3.12.3", "jax": ...}]}.
                         "method": name of the method in figures and tables. "remat": rematerialization of the backward
                         pass, from model.remat or, if it is "auto", from the memory plan. "versions": software versions
                         that the run was trained with, see system/versions.py. "digests": digests of the problems, the
                         policy, the judge and the files that the configuration names, see startup/resume_checks.py. A
                         run is only resumed if they are unchanged, except for the digest of the folder `model.path`,
                         which only studies compare. "code" and "code_changes": digests of the files with the user's
                         code, and changes of them that were accepted, see startup/resume_code.py. "base": folder of
                         the base policy, only if checkpoints contain only an adapter.
    data.json            Number of problems, and of dropped problems by reason.
    metrics.jsonl        One row per step, {"step": 12, "reward": 0.61, ...}, and one row per evaluation, {"step": 12,
                         "eval/reward": 0.58, ...}, after the row of its step. With the embedded sampler and a judge
                         without a server, all values are determined by the configuration and the seed. On CPUs, a
                         resumed run then writes the same bytes as an uninterrupted run.
    timing.jsonl         One row per completed step, {"step": 12, "seconds/generate": 3.2, ...}, with
                         values that depend on the machine. A step whose weight push or evaluation was interrupted has
                         no row. seconds/STAGE: duration of the stage for the batch of this step.
                         exclusive_seconds/STAGE: time during this step in which only this stage was in progress.
                         sync/step_fraction: fraction of the step spent on pushing weights. memory/peak_bytes: peak
                         memory so far of the most heavily used device or, on CPU, of the process.
    timeline.jsonl       One row per completed step, {"step": 3, "seconds": 4.1, "start": 12.5, "spans": [["generate",
                         0.0, 1.2, 3], ...]}, with the stages that were in progress since the previous row: from `start`
                         seconds after training began (or resumed), for `seconds`. A span consists of the stage, its
                         start and end relative to `start`, and the step of its batch. The step of the batch is the
                         next step for a batch that is generated ahead, and the previous step for a checkpoint, which is
                         written after the row of its step.
    generations.jsonl    One row per logged generation, with the columns of `LOGGED_GENERATION` and, for episodes,
                         `EPISODE`, or `FAILURE`.
    audit.jsonl          One row per audited prompt of a logged step, with the columns of `AUDITED`. Rows are written
                         while later steps are trained, and by the audit command.
    tensorboard/         Metrics and timing as TensorBoard events, and traces of the steps of train.profile_steps.
    checkpoints/         Checkpoints, see model/checkpoint.py.
    checkpoints.corrupted/ Corrupted checkpoints that were skipped.
    lock                 Lock file of the training process, which identifies the folder of a run, see
                         system/output_folder.py. Other processes may read the folder.
    policy/              Hugging Face folder of the base policy, without weights.
    report/              Default folder of the run's report, see report/__main__.py.
    log.txt              Output of the run and of its evaluation, if a study executes them.

In JSON, values that are not finite are null. TensorBoard events contain them unchanged.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.metrics.evaluation import binary_metric
from poly_epo_jax.metrics.logged import is_held_out
from poly_epo_jax.system.file_lock import InUseError
from poly_epo_jax.system.json_files import Columns, Row, keep_rows, read_object, read_rows as read_json_rows
from poly_epo_jax.system.output_folder import claim_folder
from poly_epo_jax.types import Clustering, Generation, GradedGroup

CONFIG, ABOUT, DATA = "config.json", "about.json", "data.json"
METRICS, TIMING, TIMELINE, GENERATIONS = "metrics.jsonl", "timing.jsonl", "timeline.jsonl", "generations.jsonl"
AUDIT = "audit.jsonl"
TENSORBOARD, CHECKPOINTS, POLICY, REPORT = "tensorboard", "checkpoints", "policy", "report"

GENERATION: Columns = {
    "problem": str,  # id
    "prompt": str,
    "generation": int,  # index among the generations of the prompt, from 0
    "response": str,
    "reward": int | float | None,  # null, like `correct`, if the environment or the reward failed
    "correct": bool | None,
    "cluster": int | None,  # null if the judge failed or no judge is configured
    "rationale": str | None,  # the judge's explanation, if there is one
}
"""Columns of a generation, in run folders and in evaluations."""
FAILURE: Columns = {
    "failure": str,  # kind of the failure, see `types.EnvironmentFailure`
    "reason": str,
}
"""Additional columns of a generation on which the environment or the reward failed. Its response is empty."""
EPISODE: Columns = {
    "turns": list,  # texts of the turns, alternating between the policy and the environment
    "strategy": str | None,  # representation of the strategy of the outcome; null if the environment has none
}
"""Additional columns of a generation that is an episode."""
LOGGED_GENERATION: Columns = {
    **GENERATION,
    "step": int,
    # Index among the step's prompts with this problem, from 0: a step across two epochs may draw a problem repeatedly.
    "occurrence": int,
    # null if a failure or algo.truncated=mask excludes the generation, or a failure of the judge the prompt
    "advantage": int | float | None,
}
"""Columns of a run's generations.jsonl. Step, problem, occurrence and generation together identify a row."""
AUDITED: Columns = {
    "step": int,
    "group": str,  # name of the group, see `recorded_groups.read_generations`
    "rewards": list,
    "clusters": list,  # clusters by the training judge, as in generations.jsonl
    "auditor": list | None,  # clusters by the second judge; null if there is none, or if it failed
    # By probe, the fraction of pairs with another verdict, or 1 if a copy has another cluster and 0 if not. Null if the
    # judge failed or the probe does not apply.
    "probes": dict,
    "failures": dict,  # reasons of failed requests, by "auditor", "audit" (all requests) or the probe
}
"""Columns of a run's audit.jsonl. The group identifies a row. Rows of requests also name the second `judge`."""


def read_rows(path: Path) -> list[Row]:
    """Reads the complete rows of a run's .jsonl file. Returns an empty list if the file does not exist.

    Raises:
      ValueError: If a complete line is not a valid row.
    """
    return list(read_json_rows(path, {"step": int}))


def is_evaluated(folder: Path, step: int) -> bool:
    """Returns True if metrics.jsonl has a row of the evaluation of the policy after exactly `step` steps.

    Args:
      folder: The run folder.
      step: Number of completed steps.

    Raises:
      ValueError: If a complete line is not a valid row.
    """
    return any(is_held_out(name) for row in read_rows(folder / METRICS) if row["step"] == step for name in row)


def held_out_values(folder: Path, metric: str, last_step: int | float = math.inf) -> dict[int, float]:
    """Reads the values of a metric by step, without values that are not finite, see also `evaluation.binary_metric`.

    Args:
      folder: The run folder.
      metric: Name of the metric. If empty, the result is empty.
      last_step: Last step whose value is read.

    Raises:
      ValueError: If a complete line is not a valid row.
    """
    rows = read_rows(folder / METRICS) if metric else []
    values = {row["step"]: row.get(metric, row.get(binary_metric(metric))) for row in rows if row["step"] <= last_step}
    return {step: value for step, value in values.items() if value is not None}


def drop_rows_after(folder: Path, step: int) -> None:
    """Removes the rows that a killed run wrote after the checkpoint from which it resumes.

    The resumed run repeats these steps and writes their rows again.

    Args:
      folder: The run folder.
      step: Step of the checkpoint. -1 removes all rows.

    Raises:
      ValueError: If a row is corrupted.
    """
    audit = (AUDIT,) if (folder / AUDIT).exists() else ()
    for name in (METRICS, TIMING, TIMELINE, GENERATIONS, *audit):
        keep_rows(folder / name, {"step": int}, lambda row: row["step"] <= step)


def resumable_config(folder: Path) -> dict[str, Any] | None:
    """Reads the configuration of the run in a folder. Returns None if the folder has no checkpoint to resume from.

    Raises:
      ConfigError: If the folder has checkpoints, but other files of their run are missing.
      ValueError: If the configuration is not a JSON object.
    """
    if not checkpoint_steps(folder):
        return None
    if missing := [name for name in (CONFIG, ABOUT, METRICS) if not (folder / name).exists()]:
        raise ConfigError(
            f"{folder} contains checkpoints but no {' and no '.join(missing)}, so that their run cannot be "
            "identified and resumed; restore the missing files, set --config.workdir to a new folder, or delete this "
            "folder."
        )
    return read_config(folder)


def checkpoint_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints of a run, including corrupted ones."""
    # Incomplete Orbax checkpoints have names such as 50.orbax-checkpoint-tmp.
    return [int(path.name) for path in (folder / CHECKPOINTS).glob("[0-9]*") if path.name.isdigit()]


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json, the configuration of the run.

    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If the file does not contain a JSON object.
    """
    return _read_existing(folder / CONFIG)


def checkpoint_digest(folder: Path, step: int) -> str | None:
    """Reads the digest that identifies a checkpoint. Returns None if the checkpoint does not exist or was emptied.

    Args:
      folder: The run folder.
      step: Step of the checkpoint.

    Raises:
      ValueError: If the record of the checkpoint is corrupted.
    """
    # Orbax writes the file for model/checkpoint.py.
    return read_object(folder / CHECKPOINTS / str(step) / "data" / "metadata", "delete the checkpoint").get("digest")


def read_about(folder: Path) -> dict[str, Any]:
    """Reads about.json, see the module docstring.

    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If the file does not contain a JSON object.
    """
    return _read_existing(folder / ABOUT)


def _read_existing(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise FileNotFoundError(f"{file.parent} has no {file.name}; specify the folder of a run.")
    return read_object(file, "restore it from a backup")


def read_method(folder: Path) -> str:
    """Reads the name of the run's method from about.json.

    Raises:
      ValueError: If about.json is missing, is invalid or does not name the method.
    """
    try:
        return str(read_about(folder)["method"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f'{folder / ABOUT} does not name the method of the run; add it, for example {{"method": "Poly-EPO"}}.'
        ) from None


def generation_rows(graded: GradedGroup) -> list[Row]:
    """Creates a row for each generation of a group, with the columns of `GENERATION` and, for episodes, `EPISODE`.

    Generations on which the environment or the reward failed have the columns of `FAILURE`. If the group is left out,
    only they have a row.

    If the reward has several parts, the column `rewards` contains the parts by name. Those that do not apply are None.
    """
    problem, generations = graded.group.problem, graded.group.generations
    parts = {
        name: [None if math.isnan(value) else value for value in part.tolist()] for name, part in graded.parts.items()
    }
    clusters: list[int | None] = [None] * len(generations)
    rationales: list[str | None] = [None] * len(generations)
    if isinstance(graded.clustering, Clustering):
        clusters = graded.clustering.ids.tolist()
        rationales = list(graded.clustering.rationales or rationales)
    prompt = {"problem": problem.id, "prompt": problem.prompt}
    names = ("generation", "reward", "correct", "cluster", "rationale")
    values = zip(
        graded.group.indices, graded.rewards.tolist(), graded.correct.tolist(), clusters, rationales, strict=False
    )
    rows = [
        prompt
        | {"response": generation.text}
        | dict(zip(names, own, strict=True))
        | _episode_columns(generation)
        | ({"rewards": {name: part[place] for name, part in parts.items()}} if parts else {})
        for place, (generation, own) in enumerate(zip(generations, values, strict=False))
    ]
    rows += [
        prompt | dict.fromkeys(names) | {"generation": index, "response": "", "failure": one.kind, "reason": one.reason}
        for index, one in graded.group.failures.items()
    ]
    return sorted(rows, key=lambda row: row["generation"])


def _episode_columns(generation: Generation) -> Row:
    if generation.outcome is None:
        return {}
    strategy = generation.outcome.strategy
    return {"turns": list(generation.turns), "strategy": None if strategy is None else repr(strategy)}


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Locks the run folder for this process. Other processes may still read it.

    Raises:
      ValueError: If the folder contains files that are not from a run, or links.
      InUseError: If another process holds the lock.
      OSError: If the folder cannot be written.
    """
    with contextlib.ExitStack() as held:
        with writing(folder):
            held.enter_context(claim_folder(folder, "run", is_known=bool(checkpoint_steps(folder))))
        yield


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Adds the folder and a remedy to the message of an OSError that occurs while writing to the folder.

    Raises:
      OSError: If the body raises an OSError. The type and errno are kept.
    """
    try:
        yield
    except InUseError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"cannot write to the run folder {folder} ({reason}); free space or choose a writable folder.",
        ) from error
