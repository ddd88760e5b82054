"""Reads the folders of runs (records/run_folder.py) and evaluations (evaluate/folder.py) for a report."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.config.methods import METHOD_PRESETS
from poly_epo_jax.evaluate.folder import RESULTS, find_results
from poly_epo_jax.records.run_folder import ABOUT, AUDIT, AUDITED, CONFIG, METRICS, TIMELINE, TIMING, read_rows
from poly_epo_jax.records.timeline import Window
from poly_epo_jax.system.json_files import read_object, read_rows as read_json_rows
from poly_epo_jax.system.output_folder import check_contents

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """The records of a run.

    Attributes:
      folder: The run folder.
      metrics: Rows of metrics.jsonl.
      timing: Rows of timing.jsonl.
      timeline: Windows of timeline.jsonl, by step.
      config: Content of config.json. Empty if the file is missing.
      versions: Distinct sets of software versions that the run was trained with, see system/versions.py. Empty if
        about.json does not list them.
      audit: Rows of audit.jsonl. Empty if the judge was not audited.
    """

    folder: Path
    metrics: Rows
    timing: Rows
    timeline: dict[int, Window]
    config: Mapping[str, Any]
    versions: Sequence[Mapping[str, str]]
    audit: Rows


EvaluationFolders = dict[str, dict[str, Path]]
"""Folders of evaluations by benchmark and model label."""


def read_folders(
    folders: Sequence[Path], models: Sequence[str] = ()
) -> tuple[dict[str, RunRecords], EvaluationFolders]:
    """Reads runs and finds evaluations.

    Args:
      folders: Folders of runs and evaluations.
      models: Labels of the models of evaluations to find, in this order. If empty, all models are found, in the order
        of `folders` and, within a folder, sorted by name.

    Returns:
      The runs by label, and the folders of evaluations, both in the order of `folders`. The label of a run is the name
      of its folder, or its path if several folders have the same name. If all runs are named RECIPE-METHOD, with the
      same recipe and different methods, their labels are the names of the methods, as in studies and evaluations.

    Raises:
      ValueError: If a folder is missing, contains neither a run nor an evaluation, or contains links, if one of its
        files is corrupted, or if a model is not found.
    """
    runs, evaluations = [], []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; specify a run folder with {METRICS} or an evaluation folder.")
        check_contents(folder)
        (evaluations if find_results(folder) else runs).append(folder)
    return {label: _read_run(run) for label, run in _labels(runs).items()}, _find_evaluations(evaluations, models)


def _labels(folders: Sequence[Path]) -> dict[str, Path]:
    names = [folder.resolve().name for folder in folders]
    recipes, methods = zip(*(name.rpartition("-")[::2] for name in names), strict=True) if names else ((), ())
    if len({*recipes}) == 1 and METHOD_PRESETS.keys() >= {*methods} and len({*methods}) == len(names):
        return dict(zip(methods, folders, strict=True))
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }


def _read_run(folder: Path) -> RunRecords:
    rows = read_rows(folder / METRICS)
    if not rows:
        raise ValueError(
            f"{folder} contains neither logged steps ({METRICS} is missing or empty) nor an evaluation "
            f"(BENCHMARK/MODEL/{RESULTS}); train or evaluate first."
        )
    timeline = _read_timeline(folder / TIMELINE)
    config, about = (read_object(folder / name, "repair or delete it") for name in (CONFIG, ABOUT))
    return RunRecords(
        folder,
        rows,
        read_rows(folder / TIMING),
        timeline,
        config,
        about.get("versions", []),
        list(read_json_rows(folder / AUDIT, AUDITED)),
    )


def _read_timeline(path: Path) -> dict[int, Window]:
    windows = {}
    for row in read_rows(path):
        try:
            windows[row["step"]] = Window.read(row)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is corrupted at step {row['step']}; repair or delete it.") from error
    return windows


def _find_evaluations(folders: Sequence[Path], models: Sequence[str]) -> EvaluationFolders:
    found, owners = EvaluationFolders(), dict[str, tuple[Path, Any]]()
    for folder in folders:
        for path in find_results(folder):
            digests = read_results(path.parent).get("digests", {})
            owner = folder, digests.get("weights", digests.get("model_files"))
            first = owners.setdefault(path.parent.name, owner)
            is_first = first[0] == folder or (first[1] is not None and first[1] == owner[1])
            label = path.parent.name if is_first else f"{path.parent.name} ({folder})"
            found.setdefault(path.parent.parent.name, {})[label] = path.parent
    known = sorted({model for folders_by_model in found.values() for model in folders_by_model})
    if unknown := [model for model in models if model not in known]:
        raise ValueError(f"Model {unknown[0]!r} has not been evaluated; choose from {', '.join(known)}.")
    ordered = {
        benchmark: {model: folders_by_model[model] for model in models or folders_by_model if model in folders_by_model}
        for benchmark, folders_by_model in found.items()
    }
    return {benchmark: by_model for benchmark, by_model in ordered.items() if by_model}


def read_results(folder: Path) -> dict[str, Any]:
    """Reads results.json of a model on a benchmark.

    Raises:
      ValueError: If the file is corrupted.
    """
    path = folder / RESULTS
    try:
        results = json.loads(path.read_bytes())
        means = [value["mean"] for value in results["metrics"].values()] + results["branching"]["mean"]
        counts = [results["num_problems"], results["num_generations"]] + [
            row[name] for row in results["per_problem"] for name in ("num_correct", "num_generations")
        ]
        _ = [row["problem"] for row in results["per_problem"]]
        if not all(map(math.isfinite, means + counts)):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not contain valid results; rerun the evaluation of this model.") from error
    return results
