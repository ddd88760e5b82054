"""A run folder: the names of its files, what their rows hold, how they are read and written. Needs no JAX.

    config.json          the run's whole configuration
    about.json           {"method": "Poly-EPO", "remat": "full", "versions": [{"python": "3.12.3", "jax": ...}]}: the
                         method's name in figures and tables; what the backward pass recomputes, as set by model.remat
                         or, with auto, by the memory plan; the versions that the run has been trained with, see
                         system/versions.py; and "base", the base policy's folder, if checkpoints hold only an adapter
    data.json            how many problems there are, and how many were left out and why
    metrics.jsonl        one row per step, {"step": 12, "reward": 0.61, ...}, and one row per evaluation, {"step": 12,
                         "eval/reward": 0.58, ...}, after the row of its step: values that are determined by the
                         configuration and the seed, so a resumed run leaves the same bytes as an uninterrupted one
    timing.jsonl         one row per step, {"step": 12, "seconds/generate": 3.2, "tokens_per_second": 5100.0, ...}:
                         numbers that depend on the machine. seconds/STAGE: how long the stage of this step's batch was
                         under way; critical/STAGE: how long it was the only one in this step; sync/share: the share of
                         the step; memory/peak_bytes: the most that a device or, for CPUs, the process has held so far
    timeline.jsonl       one row per step, {"step": 3, "seconds": 4.1, "spans": [["generate", 0.0, 1.2, 3], ...],
                         "start": 12.5}: what was under way since the previous row, from `start` seconds after training
                         began (or resumed), for `seconds`. A span is a stage, its start and end in that time, and the
                         step whose batch it is for: the next one if its batch is generated ahead, or the last one,
                         which is being checkpointed
    generations.jsonl    one row per logged generation, with the columns of `LOGGED_GENERATION`
    tensorboard/         metrics and timing as TensorBoard events
    checkpoints/         see model/checkpoint.py
    checkpoints.damaged/ checkpoints that were found damaged and skipped
    lock                 held by the process that trains; others may read meanwhile
    policy/              the base policy's Hugging Face folder, without weights
    report/              see report/
    log.txt              what the run has printed, if a study has started it

In JSON, null stands for a number that is not finite (TensorBoard keeps it).
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poly_epo_jax.metrics.logged import is_held_out
from poly_epo_jax.system.file_lock import InUseError, exclusive
from poly_epo_jax.system.json_files import Columns, Row, keep_rows
from poly_epo_jax.system.json_files import read_rows as read_json_rows
from poly_epo_jax.types import Clustering, GradedGroup

CONFIG, ABOUT, DATA = "config.json", "about.json", "data.json"
METRICS, TIMING, TIMELINE, GENERATIONS = "metrics.jsonl", "timing.jsonl", "timeline.jsonl", "generations.jsonl"
TENSORBOARD, CHECKPOINTS, POLICY, REPORT, LOCK = "tensorboard", "checkpoints", "policy", "report", "lock"

GENERATION: Columns = {
    "problem": str,  # its id
    "prompt": str,
    "generation": int,  # which of the prompt's, from 0
    "response": str,
    "reward": int | float,
    "correct": bool,
    "cluster": int | None,  # null where the judge failed, or there is none
    "rationale": str | None,  # the judge's reason, if it gave one
}
"""The columns of a generation, in run folders and in evaluations."""
LOGGED_GENERATION: Columns = {
    **GENERATION,
    "step": int,
    "occurrence": int,  # which of the step's prompts with this problem, from 0: an epoch's end may bring it twice
    "advantage": int | float | None,  # null if the prompt took no part in the update
}
"""The columns of a run's generations.jsonl. Step, problem, occurrence and generation together name one row."""


def read_rows(path: Path) -> list[Row]:
    """The complete rows of a .jsonl file of a run; none if it does not exist (yet).

    Raises:
      ValueError: a complete line is not a row.
    """
    return list(read_json_rows(path, {"step": int}))


def is_evaluated(folder: Path, step: int) -> bool:
    """Returns True if metrics.jsonl has a row of an evaluation after `step`.

    Raises:
      ValueError: If a complete line is not a row.
    """
    rows = [row for row in read_rows(folder / METRICS) if row["step"] == step]
    return any(map(is_held_out, itertools.chain.from_iterable(rows)))


def drop_rows_after(folder: Path, step: int) -> None:
    """Removes the rows that a killed run wrote after the checkpoint of `step`; -1 removes all rows.

    Raises:
      ValueError: a row is damaged.
    """
    for name in (METRICS, TIMING, TIMELINE, GENERATIONS):
        keep_rows(folder / name, {"step": int}, lambda row: row["step"] <= step)


def resumable_config(folder: Path) -> dict[str, Any] | None:
    """The configuration of the run that a checkpoint in the folder belongs to; None if there is none to resume."""
    begun = (folder / CONFIG).exists()
    # What Orbax has not finished is called 50.orbax-checkpoint-tmp, for example.
    if not begun or not any(path.name.isdigit() for path in (folder / CHECKPOINTS).glob("[0-9]*")):
        return None
    return read_config(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """The run's configuration, from config.json."""
    return json.loads((folder / CONFIG).read_text(encoding="utf-8"))


def read_about(folder: Path) -> dict[str, Any]:
    """The content of about.json."""
    return json.loads((folder / ABOUT).read_text(encoding="utf-8"))


def read_method(folder: Path) -> str:
    """The name of the run's method.

    Raises:
      ValueError: the folder does not say it.
    """
    try:
        return str(read_about(folder)["method"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f'{folder / ABOUT} does not name the method of the run; write one there, such as {{"method": "Poly-EPO"}}.'
        ) from None


def generation_rows(graded: GradedGroup) -> list[Row]:
    """A row with the columns of `GENERATION` for each of the group's generations."""
    problem, generations = graded.group.problem, graded.group.generations
    clusters: list[int | None] = [None] * len(generations)
    rationales: list[str | None] = [None] * len(generations)
    if isinstance(graded.clustering, Clustering):
        clusters = graded.clustering.ids.tolist()
        rationales = list(graded.clustering.rationales or rationales)
    return [
        {
            "problem": problem.id,
            "prompt": problem.prompt,
            "generation": index,
            "response": generation.text,
            "reward": float(graded.rewards[index]),
            "correct": bool(graded.correct[index]),
            "cluster": clusters[index],
            "rationale": rationales[index],
        }
        for index, generation in enumerate(generations)
    ]


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Holds the folder for this process alone; others may still read it.

    Raises:
      InUseError: another process holds it.
      OSError: the folder cannot be written.
    """
    with contextlib.ExitStack() as held:
        with writing(folder):
            held.enter_context(exclusive(folder / LOCK, f"the run folder {folder}"))
        yield


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Surrounds whatever writes to the folder; if that fails, says in one sentence why.

    Raises:
      OSError: of the same kind as the one caught.
    """
    try:
        yield
    except InUseError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno, f"cannot write to the run folder {folder} ({reason}): make room or choose a writable folder."
        ) from error
