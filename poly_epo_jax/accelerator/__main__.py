"""Checks and measures an accelerator: correctness, learning, speed of update and decoding, whole steps, tests.

bash launch/accelerator.sh                         six stages in nine minutes, in the order of their value
bash launch/accelerator.sh --stages compare        GRPO against Poly-EPO with a policy of 90 million weights
SMALL=1 bash launch/accelerator.sh                 the same with tiny sizes, on any machine

Each measurement is a process with a time limit. Unused time is left to later measurements. Repeated calls reuse
compiled programs and base policies. The file summary.json in the output folder is valid at any time. The exit code is 0
if all stages passed or were skipped, and 10 + N if stage N of doctor, learning, update, decode, step, tests and compare
is the first that failed or did not finish.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.accelerator.figures import show
from poly_epo_jax.accelerator.stages import Measurement, Stage, make_stages
from poly_epo_jax.bench.console import wide_console
from poly_epo_jax.system.json_files import read_object, write_json
from poly_epo_jax.system.output_folder import claim_folder
from poly_epo_jax.system.signals import Stopped, StopSignal, exit_code
from poly_epo_jax.system.versions import versions

SCHEMA = 1  # version of the format of summary.json
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL, for a process whose time is over
DOES_NOT_FIT = "of memory per device, but JAX may use only"  # in the error message of startup/prepare.py
STATUSES = ("stopped", "failed", "out of time", "unfinished", "passed", "skipped")  # the first one counts


async def run_stages(stages: Sequence[Stage], folder: Path, seconds: float, summary: dict[str, Any]) -> None:
    """Runs the measurements of all stages, and writes the summary before the first and after each of them.

    Args:
      stages: Stages in the order in which they run.
      folder: Output folder.
      seconds: Time of all stages, divided among the measurements in proportion to `Measurement.seconds`.
      summary: Content of summary.json, to which the results of the stages are added. Results of other stages in an
        existing file with the same content are kept.

    Raises:
      Stopped: If a signal was received. All started processes have ended, and the summary is written.
    """
    stop, start, planned = StopSignal(), time.monotonic(), 0.0
    total = sum(measurement.seconds for stage in stages for measurement in stage.measurements)
    earlier = read_object(folder / "summary.json", "delete it")
    rows = {stage.name: {"status": "not started", "messages": [], "figures": []} for stage in stages}
    summary["stages"] = (earlier["stages"] if summary.items() <= earlier.items() else {}) | rows
    write_json(folder / "summary.json", summary)
    with stop.on_signals():
        for stage in stages:
            shutil.rmtree(folder / stage.name, ignore_errors=True)  # of an earlier call
            (folder / stage.name).mkdir()
            row, began, outcomes = rows[stage.name], time.monotonic(), list[str]()
            for number, measurement in enumerate(stage.measurements, start=1):
                print(f"{stage.name}: {measurement.name}", flush=True)
                planned += measurement.seconds
                log = folder / stage.name / f"{measurement.name}.log"
                outcomes.append(await _run(measurement, log, start + seconds * planned / total, stop))
                if outcomes[-1] not in ("passed", "skipped"):
                    row["messages"].append(f"{measurement.name}: {outcomes[-1]}; see {log}")
                try:
                    row["figures"] = list(stage.read(folder / stage.name))
                except (ValueError, LookupError, TypeError, OSError) as error:  # Later stages do not depend on it.
                    row["messages"].append(f"{measurement.name}: {type(error).__name__}: {error}")
                    outcomes.append("failed")
                found = {
                    *outcomes,
                    *(figure["status"] for figure in row["figures"]),
                    *(["unfinished"] if number < len(stage.measurements) else []),
                }
                row |= {"status": min(found & {*STATUSES}, key=STATUSES.index), "seconds": time.monotonic() - began}
                write_json(folder / "summary.json", summary)
                await stop.check()


async def _run(measurement: Measurement, log: Path, deadline: float, stop: StopSignal) -> str:
    # Runs a process until it ends, its time is over or a signal arrives, and returns the outcome. In a new session, a
    # process can be terminated together with the processes that it has started.
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *measurement.command,
            cwd=log.parents[1],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            code = await stop.run_interruptible(process.wait())
    except (TimeoutError, Stopped) as error:
        return "stopped" if isinstance(error, Stopped) else "out of time"
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
    is_small = bool(os.environ.get("SMALL"))
    stages = {stage.name: stage for stage in make_stages(is_small)}
    parser = argparse.ArgumentParser("bash launch/accelerator.sh", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="time of all stages (default: 9)")
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="folder of the results")
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=[*stages],
        default=[*stages][:-1],
        help="stages to run (default: all but compare)",
    )
    options = parser.parse_args(arguments)
    summary = {"schema": SCHEMA, "card": os.environ.get("CARD", ""), "versions": versions(), "small": is_small}

    def work() -> int:
        selected = [stages[name] for name in options.stages]
        with claim_folder(options.output, "accelerator check"):
            try:
                asyncio.run(run_stages(selected, options.output, 60 * options.minutes, summary))
            except Stopped as stopped:
                return 128 + stopped.number
            finally:
                if "stages" in summary:
                    show(summary["stages"], wide_console())
                    print(f"Written to {options.output / 'summary.json'}.")
        done = {name for name, row in summary["stages"].items() if row["status"] in ("passed", "skipped")}
        return next((10 + [*stages].index(name) + 1 for name in options.stages if name not in done), 0)

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
