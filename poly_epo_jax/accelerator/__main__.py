"""Checks and measures an accelerator: correctness, learning, speed of update and decoding, whole steps, tests.

bash launch/accelerator.sh                         six stages in nine minutes, in the order of their value
bash launch/accelerator.sh --stages=compare        GRPO against Poly-EPO at the scale of a GPU, a call of its own
SMALL=1 bash launch/accelerator.sh                 the same with tiny sizes, on any machine

Each measurement is a process with a time limit. Unused time is left to later measurements. The file summary.json in the
output folder is valid at any time. The exit code is 0 if all stages passed or were skipped, and 10 + N if stage N of
`doctor,learning,update,decode,step,tests,compare` is the first that failed or did not finish.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from poly_epo_jax.accelerator.figures import show
from poly_epo_jax.accelerator.stages import Measurement, Stage, make_stages
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.system.signals import Stopped, StopSignal, exit_code
from poly_epo_jax.system.user_path import user_path
from poly_epo_jax.system.versions import versions

SCHEMA = 1
"""Version of the format of summary.json."""
GRACE_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL for a process whose time is over."""
DOES_NOT_FIT = "of memory per device, but JAX may use only"
"""Part of the error message of a measurement that exceeds the memory plan. The measurement is skipped."""
CARD = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


async def run_stages(stages: Sequence[Stage], folder: Path, seconds: float, summary: dict[str, Any]) -> None:
    """Runs the measurements of all stages, and writes the summary before the first and after each of them.

    Args:
      stages: Stages in the order in which they run.
      folder: Output folder.
      seconds: Time of all stages, divided among the measurements in proportion to `Measurement.seconds`.
      summary: Content of summary.json, to which the results of the stages are added.

    Raises:
      Stopped: If a signal was received. All started processes have ended, and the summary is written.
    """
    stop, start, planned = StopSignal(), time.monotonic(), 0.0
    total = sum(measurement.seconds for stage in stages for measurement in stage.measurements)
    summary["stages"] = {stage.name: {"status": "not started", "messages": [], "figures": []} for stage in stages}
    write_json(folder / "summary.json", summary)
    with stop.on_signals():
        for stage in stages:
            (folder / stage.name).mkdir(exist_ok=True)
            row, began, outcomes = summary["stages"][stage.name], time.monotonic(), list[str]()
            for measurement in stage.measurements:
                print(f"{stage.name}: {measurement.name}", flush=True)
                planned += measurement.seconds
                limit = start + seconds * planned / total - time.monotonic()
                log = folder / stage.name / f"{measurement.name}.log"
                outcomes.append(await _run(measurement, log, limit, stop) if limit > 0 else "out of time")
                if outcomes[-1] not in ("passed", "skipped"):
                    row["messages"].append(f"{measurement.name}: {outcomes[-1]}; see {log}")
                try:
                    row["figures"] = list(stage.read(folder / stage.name))
                except (ValueError, KeyError, TypeError, OSError) as error:  # Later stages do not depend on it.
                    row["messages"].append(f"{measurement.name}: {type(error).__name__}: {error}")
                    outcomes.append("failed")
                row |= {"status": _status(stage, row, outcomes), "seconds": round(time.monotonic() - began, 1)}
                write_json(folder / "summary.json", summary)
                await stop.check()


def _status(stage: Stage, row: dict[str, Any], outcomes: Sequence[str]) -> str:
    """Returns the status of a stage after some of its measurements: the worst outcome or figure so far."""
    found = {*outcomes, *(figure["status"] for figure in row["figures"])}
    if len(outcomes) < len(stage.measurements):
        found.add("unfinished")
    order = ("stopped", "failed", "out of time", "unfinished", "passed", "skipped")
    return next(status for status in order if status in found)


async def _run(measurement: Measurement, log: Path, limit: float, stop: StopSignal) -> str:
    """Runs a process until it ends, its time is over or a signal arrives, and returns the outcome."""
    with log.open("wb") as output:
        # In a new session, a process can be terminated together with the processes that it has started.
        process = await asyncio.create_subprocess_exec(
            *measurement.command,
            cwd=log.parents[1],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(limit):
            code = await stop.run_interruptible(process.wait())
    except TimeoutError:
        return "out of time"
    except Stopped:
        return "stopped"
    finally:
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                os.killpg(process.pid, number)
                await asyncio.wait_for(process.wait(), seconds)
    if code == measurement.exit_code:
        return "passed"
    return "skipped" if DOES_NOT_FIT in " ".join(log.read_text(errors="replace").split()) else "failed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code."""
    stages = {stage.name: stage for stage in make_stages(is_small=bool(os.environ.get("SMALL")))}
    parser = argparse.ArgumentParser("bash launch/accelerator.sh", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="time of all stages (default: 9)")
    parser.add_argument("--output", type=user_path, metavar="DIR", help="folder of the results, of the script")
    parser.add_argument("--stages", default=",".join([*stages][:-1]), help="stages to run (default: all but the last)")

    def work() -> int:
        options = parser.parse_args(arguments)
        names = options.stages.split(",")
        if unknown := set(names) - stages.keys():
            raise ConfigError(f"--stages contains {', '.join(unknown)}; choose from {', '.join(stages)}.")
        folder = options.output.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        summary: dict[str, Any] = {"schema": SCHEMA, "small": bool(os.environ.get("SMALL")), "versions": versions()}
        card = subprocess.run(CARD, capture_output=True, text=True).stdout if shutil.which(CARD[0]) else ""
        summary |= {"card": card.strip(), "minutes": options.minutes}
        try:
            asyncio.run(run_stages([stages[name] for name in names], folder, 60 * options.minutes, summary))
        except Stopped as stopped:
            print(f"{stopped}: the summary contains the finished measurements.", file=sys.stderr)
            return 128 + stopped.number
        finally:
            show(summary["stages"], Console(width=max(Console().width, 120)))
            print(f"Written to {folder / 'summary.json'}.")
        found = {name: row["status"] in ("passed", "skipped") for name, row in summary["stages"].items()}
        return next((10 + number for number, name in enumerate(stages, 1) if not found.get(name, True)), 0)

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
