"""Reads the current results of a study from its folder. Does not require JAX."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.evaluate.folder import find_results
from poly_epo_jax.metrics import evaluation
from poly_epo_jax.metrics.evaluation import CORRECT_CLUSTERS, EVALUATION_METRICS, at
from poly_epo_jax.metrics.intervals import Interval, mean_interval, paired_difference
from poly_epo_jax.metrics.logged import HELD_OUT_CORRECT_CLUSTERS, HELD_OUT_REWARD, describe, held_out, is_held_out
from poly_epo_jax.records import run_folder
from poly_epo_jax.study.folder import EVALUATION, PLAN, RunKey, RunState, read_attempts, run_state
from poly_epo_jax.system.json_files import Row, read_object

REWARD, CORRECT_OF_8 = HELD_OUT_REWARD, HELD_OUT_CORRECT_CLUSTERS
CORRECT_OF_64 = held_out(at(CORRECT_CLUSTERS, 64))
SHOWN_K = (8, 64)
"""Values of k at which tables show metrics that depend on k. Metrics with `every_k` are also shown at k = 1."""

ADVICE = "delete it and rerun the study"

Cell = tuple[str, str, float]
"""Task, method and learning rate of runs that differ only in their seeds."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The current results of a run.

    Attributes:
      key: Task, method, learning rate and seed.
      state: Progress of the run.
      rows: Rows of metrics.jsonl.
      config: Content of config.json. Empty if the run has not started.
      versions: Distinct sets of software versions that the run was trained with, see system/versions.py.
      evaluations: Content of results.json by benchmark. Evaluations of weights that the run has replaced are omitted.
    """

    key: RunKey
    state: RunState
    rows: Sequence[Row]
    config: Mapping[str, Any]
    versions: Sequence[Mapping[str, str]]
    evaluations: Mapping[str, Mapping[str, Any]]

    @property
    def cell(self) -> Cell:
        """Task, method and learning rate."""
        return self.key.task, self.key.method, self.key.rate

    @property
    def generations_drawn(self) -> dict[int, int]:
        """Number of responses that were generated for training, by the number of completed steps."""
        drawn = {row["step"]: row["data/drawn"] for row in self.rows if "data/drawn" in row}
        totals = itertools.accumulate(drawn.values())
        of_prompt = self.config.get("train", {}).get("num_generations", 0)
        return {0: 0} | {step: int(total) * of_prompt for step, total in zip(drawn, totals, strict=True)}

    @property
    def metrics(self) -> set[str]:
        """Names of the metrics that the run and its evaluations have, see `at_end`."""
        return {f"{benchmark}: {name}" for benchmark, one in self.evaluations.items() for name in one["metrics"]}.union(
            *self.rows
        )

    def at_end(self, metric: str) -> float | None:
        """Returns the last value of a metric, or None if there is none.

        `BENCHMARK: METRIC` is a metric of a separate evaluation. A metric of held-out problems is that of the last
        evaluation. Metrics of graded rewards that an evaluation omits are replaced by `binary_metric`.
        """
        benchmark, _, name = metric.rpartition(": ")
        values: Mapping[str, Any] = {}
        if benchmark:
            values = {
                name: entry["mean"]
                for name, entry in self.evaluations.get(benchmark, {"metrics": {}})["metrics"].items()
            }
        elif rows := [
            row for row in self.rows if metric in row or (is_held_out(metric) and any(map(is_held_out, row)))
        ]:
            values = rows[-1]
        found = values.get(name, values.get(evaluation.binary_metric(name)))
        return None if found is None else float(found)


@dataclasses.dataclass(frozen=True)
class StudyResults:
    """The current results of a study.

    Attributes:
      baseline: Method that the other methods are compared with.
      results: Results of all runs.
      attempts: Rows of attempts.jsonl.
      others: Content of results.json of other models that are evaluated in the folder, by label and benchmark.
    """

    baseline: str
    results: Sequence[Result]
    attempts: Sequence[Row]
    others: Mapping[str, Mapping[str, Any]]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the order of the study file."""
        return list(dict.fromkeys(one.key.task for one in self.results))

    @property
    def methods(self) -> list[str]:
        """Names of the methods, in the order of the study file."""
        return list(dict.fromkeys(one.key.method for one in self.results))

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates in ascending order."""
        return sorted({one.key.rate for one in self.results})

    def cells(self, task: str) -> list[Cell]:
        """Returns the cells of a task by method, each in ascending order of the learning rate."""
        return [(task, method, rate) for method in self.methods for rate in self.learning_rates]

    def benchmarks(self, task: str) -> list[str]:
        """Labels of the benchmarks on which runs of a task were evaluated, sorted."""
        return sorted({name for one in self.results if one.key.task == task for name in one.evaluations})

    def references(self, task: str, benchmark: str) -> dict[str, Mapping[str, Any]]:
        """Returns the content of results.json of the models that are evaluated but not trained by the study, by label.

        A label that begins with the name of a task and a hyphen is a reference of this task only. Runs that the study
        no longer contains are not references.

        Args:
          task: Name of the task.
          benchmark: Label of the benchmark.
        """
        # The name of a task can begin with that of another task.
        owners = {
            label: max((name for name in self.tasks if label.startswith(f"{name}-")), key=len, default=task)
            for label in self.others
        }
        return {
            label.removeprefix(f"{task}-"): found[benchmark]
            for label, found in self.others.items()
            if benchmark in found and owners[label] == task and not RunKey.is_label(label)
        }

    def of(self, cell: Cell, finished: bool = True) -> list[Result]:
        """Returns the started runs of a cell, sorted by seed.

        Args:
          cell: Task, method and learning rate.
          finished: Whether to return the finished runs. If False, the unfinished runs are returned.
        """
        found = [one for one in self.results if one.cell == cell and one.state.is_finished == finished]
        return sorted((one for one in found if one.rows), key=lambda one: one.key.seed)

    def by_seed(self, cell: Cell, metric: str) -> dict[int, float]:
        """Returns the last value of a metric by seed, for finished runs that have the metric."""
        values = {one.key.seed: one.at_end(metric) for one in self.of(cell)}
        return {seed: value for seed, value in values.items() if value is not None}

    def interval(self, cell: Cell, metric: str) -> Interval | None:
        """Returns mean and interval of a metric over finished runs, or None if no finished run has the metric."""
        values = self.by_seed(cell, metric)
        return mean_interval(np.array(list(values.values()))) if values else None

    def difference(self, cell: Cell, metric: str) -> Interval | None:
        """Returns the difference from the baseline, paired by seed, with its interval.

        Returns None for the baseline itself, and if no seed has the metric in finished runs of both methods.

        Args:
          cell: Task, method and learning rate.
          metric: Name of the metric, see `Result.at_end`.
        """
        task, method, rate = cell
        if method == self.baseline:
            return None
        return paired_difference(self.by_seed(cell, metric), self.by_seed((task, self.baseline, rate), metric))

    def metrics(self, task: str) -> dict[str, str]:
        """Returns the titles of the metrics of a task's results by name, without metrics that no run has."""
        shown = [
            at(stem, k)
            for stem, metric in EVALUATION_METRICS.items()
            for k in metric.sizes([1, *SHOWN_K] if metric.every_k else SHOWN_K)
            if "study" in metric.tables
        ]
        found = {name: describe(name).title for name in (REWARD, *map(held_out, shown))}
        for benchmark in self.benchmarks(task):
            found |= {
                f"{benchmark}: {name}": f"{evaluation.describe(name).title} ({benchmark}, evaluated)" for name in shown
            }
        names = {name for one in self.results if one.key.task == task for name in one.metrics}
        return {metric: title for metric, title in found.items() if metric in names}


def read_results(folder: Path) -> StudyResults:
    """Reads the current results of a study.

    Raises:
      ValueError: If the folder does not contain a study, or one of its files is corrupted.
    """
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        run_keys = [RunKey(**entry) for entry in plan["runs"]]
        baseline = plan["baseline"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Failed to read the runs of a study from {folder / PLAN}; run the study first.") from error
    evaluations: dict[str, dict[str, Any]] = {}
    for path in find_results(folder / EVALUATION):
        evaluations.setdefault(path.parent.name, {})[path.parent.parent.name] = read_object(path, ADVICE)
    results = [_read_run(folder, run_key, evaluations.pop(run_key.label, {})) for run_key in run_keys]
    return StudyResults(baseline, results, read_attempts(folder), evaluations)


def _read_run(folder: Path, run_key: RunKey, evaluations: Mapping[str, Any]) -> Result:
    run = folder / run_key.path
    config, about = (read_object(run / name, ADVICE) for name in (run_folder.CONFIG, run_folder.ABOUT))
    rows, state = run_folder.read_rows(run / run_folder.METRICS), run_state(run)
    weights = run_folder.checkpoint_digest(run, state.num_steps)  # None if keep_weights=False emptied the checkpoint
    current = {
        benchmark: results
        for benchmark, results in evaluations.items()
        if weights in (None, results.get("digests", {}).get("weights"))
    }
    return Result(run_key, state, rows, config, about.get("versions", []), current)
