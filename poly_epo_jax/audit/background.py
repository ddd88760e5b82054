"""Audits the logged steps of a run in a thread, while later steps are trained."""

import asyncio
import itertools
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from poly_epo_jax.audit.auditor import UNFINISHED, Auditor, empty_row, missing_audits, warn_of_failures
from poly_epo_jax.config.keys import Config, ConfigError, max_draws
from poly_epo_jax.metrics.intervals import interval_text
from poly_epo_jax.metrics.judge_audit import summarize
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.records.run_folder import AUDIT, AUDITED, writing
from poly_epo_jax.system.json_files import Row, append_rows, read_rows
from poly_epo_jax.system.signals import StopSignal
from poly_epo_jax.types import Task

MAX_PENDING = 64
"""Maximum number of steps that wait for their audit. Further steps are left to the audit command."""


class BackgroundAudit:
    """Audits steps one after another in a daemon thread with its own event loop, so that training never waits for it.

    The constructor submits the audits that an interrupted run has not completed.

    Args:
      config: The configuration.
      task: Task of the run.
      stop: Stops the run, after a completed step that is saved, if an inflation exceeds `audit.stop_inflation`.
    """

    def __init__(self, config: Config, task: Task, stop: StopSignal):
        self._config, self._stop, self._folder = config, stop, Path(config.workdir)
        self._auditor, self._lock, self._closed = Auditor(config, task), threading.Lock(), False
        self._pending: queue.Queue[tuple[int, list[RecordedGroup]] | None] = queue.Queue()
        self._incomplete: dict[int, list[RecordedGroup]] = {}
        every, num_steps = config.audit.every, config.train.num_steps
        print(self._auditor.cost(-(-num_steps // every) * min(config.audit.num_prompts, max_draws(config.train))))
        for step, groups in missing_audits(self._folder, self._auditor, every, num_steps):
            self._submit(step, groups)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="audit", daemon=True)
        self._thread.start()

    def submit(self, step: int, rows: Sequence[Row]) -> None:
        """Submits a logged step. Does not wait.

        Args:
          step: The step.
          rows: Its rows of generations.jsonl, without the step.
        """
        self._submit(step, self._auditor.sample(step, [{"step": step} | row for row in rows]))

    def close(self, wait_seconds: float) -> None:
        """Waits for the audits in progress, and records those that have not completed as failures.

        Args:
          wait_seconds: Maximum wait in seconds.
        """
        self._pending.put(None)
        self._thread.join(wait_seconds)
        with self._lock:
            self._closed = True
            failure = {"audit": f"{UNFINISHED}: The run ended before the audit."}
            for step, groups in self._incomplete.items():
                self._write([empty_row(step, group, failure) for group in groups])

    def _submit(self, step: int, groups: list[RecordedGroup]) -> None:
        self._incomplete[step] = groups
        if len(self._incomplete) <= MAX_PENDING:
            self._pending.put((step, groups))

    async def _work(self) -> None:
        while (submitted := self._pending.get()) is not None:
            step, groups = submitted
            try:
                rows = await self._auditor.audit(step, groups)
            except Exception as error:  # an error of an audit must not stop the run
                reason = f"raised: {type(error).__name__}: {error}"
                rows = [empty_row(step, group, {"audit": reason}) for group in groups]
            with self._lock:
                if not self._closed:
                    del self._incomplete[step]
                    self._write(rows)
                    self._check_inflation(step, rows)

    def _check_inflation(self, step: int, rows: Sequence[Row]) -> None:
        if excess := _excess(self._config, step, rows):
            self._stop.request(signal.SIGTERM, excess)

    def _write(self, rows: Sequence[Row]) -> None:
        try:
            with writing(self._folder):
                append_rows(self._folder / AUDIT, rows)
        except OSError as error:  # must neither end the thread nor stop the run
            print(f"Warning: An audit is not recorded: {error} The audit command repeats it.", file=sys.stderr)
        warn_of_failures(rows)


def check_inflation(config: Config) -> None:
    """Checks that a run does not resume on a judge that inflates.

    Args:
      config: Configuration of the resuming command.

    Raises:
      ConfigError: If the last audited step of the run exceeds `audit.stop_inflation`.
    """
    rows = list(read_rows(Path(config.workdir) / AUDIT, AUDITED)) if config.audit.stop_inflation else []
    of_steps = itertools.groupby(sorted(rows, key=lambda row: -row["step"]), lambda row: row["step"])
    excesses = (_excess(config, step, list(of_step)) for step, of_step in of_steps)
    if excess := next((excess for excess in excesses if excess is not None), ""):
        raise ConfigError(excess)


def _excess(config: Config, step: int, rows: Sequence[Row]) -> str | None:
    """Describes the inflation of an audited step if it exceeds `audit.stop_inflation`.

    Returns:
      Sentences, or an empty string if the inflation is within the limit. None if the step has no inflation.
    """
    found, limit = summarize(rows, config.algo.set_size)["inflation"], config.audit.stop_inflation
    if not (limit and found and (found["low"] or 0) > limit):
        return None if found is None else ""
    return (
        f"The judge counts {interval_text(found)} times as many clusters as the auditor in step {step}, above "
        f"audit.stop_inflation={limit:g}. Train with another judge in a new folder, or raise the limit to resume."
    )
