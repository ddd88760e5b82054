"""Audits the logged steps of a run in a thread, while later steps are trained."""

import asyncio
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from poly_epo_jax.audit.auditor import UNFINISHED, Auditor, empty_row, missing_audits, warn_of_failures
from poly_epo_jax.config.keys import Config, max_draws
from poly_epo_jax.metrics.intervals import interval_text
from poly_epo_jax.metrics.judge_audit import summarize
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.records.run_folder import AUDIT, writing
from poly_epo_jax.system.json_files import Row, append_rows
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
        self._config, self._stop = config, stop
        self._folder = Path(config.workdir)
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
        found, limit = summarize(rows, self._config.algo.set_size)["inflation"], self._config.audit.stop_inflation
        if limit and found and (found["low"] or 0) > limit:
            print(
                f"Warning: The run stops, because the judge counts {interval_text(found)} times as many clusters as "
                f"the auditor in step {step}, above audit.stop_inflation={limit:g}. Set a higher value to resume.",
                file=sys.stderr,
            )
            self._stop.request(signal.SIGTERM)

    def _write(self, rows: Sequence[Row]) -> None:
        try:
            with writing(self._folder):
                append_rows(self._folder / AUDIT, rows)
        except OSError as error:  # must neither end the thread nor stop the run
            print(f"Warning: An audit is not recorded: {error} The audit command repeats it.", file=sys.stderr)
        warn_of_failures(rows)
