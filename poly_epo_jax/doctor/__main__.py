"""Checks devices, kernels, collectives, disk, servers and judge with the configuration of a run, in three minutes.

python -m poly_epo_jax.doctor --config=configs/polaris.py:h200x8                before the first run on a machine
python -m poly_epo_jax.doctor --config=configs/polaris.py:h200x8 --short        the checks of launch/ before training

Each check passes, fails, or is skipped if its subject does not exist. A failed check prints a remedy, and the exit code
is then 1. The short form does not change the weights of the servers and does not measure times. The full form pushes
the initial weights of the run to the servers, like the first step of the run. Do not use it while other runs use the
servers.
"""

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from poly_epo_jax.config.keys import Config
from poly_epo_jax.doctor.agreement import check_decoding
from poly_epo_jax.doctor.collectives import check_collectives
from poly_epo_jax.doctor.machine import check_checkpoint, check_devices, check_kernel, check_step
from poly_epo_jax.doctor.runner import CheckResult, CheckRunner, DoctorCheck, Finding, RunContext
from poly_epo_jax.doctor.servers import check_generations, check_judge, check_weights
from poly_epo_jax.parallel import hosts
from poly_epo_jax.startup.command_line import config_parser, run_command
from poly_epo_jax.startup.prepare import check_writable, configure_compiler, prepare
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.system.output_folder import user_path


def check_settings(run: RunContext) -> CheckResult:
    """Checks folders, data, sequence lengths and the memory plan."""
    task = prepare(run.config).task
    train, held_out = len(task.train_problems), len(task.held_out_problems)
    figures = {"training problems": train, "held-out problems": held_out}
    return f"folders, lengths and memory are valid; {train:,} training and {held_out:,} held-out problems", figures


COLORS = {"passed": "green", "failed": "bold red", "skipped": "dim"}
WIDTH = 110  # Minimum width of the table in characters, even if the output is a file.


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """Prints a table with one row per finding, and the number of findings with each status.

    Args:
      findings: Findings of all checks, in order.
      console: Console to which the table is printed.
    """
    console.width = max(console.width, WIDTH)
    table = Table(
        Column("check", max_width=32, overflow="fold"),
        Column("result", no_wrap=True),
        Column("s", justify="right", no_wrap=True),
        "message and remedy",
        box=box.SIMPLE_HEAD,
    )
    for one in findings:
        color = COLORS[one.status]
        table.add_row(escape(one.name), f"[{color}]{one.status}[/]", f"{one.seconds:.1f}", f"{escape(one.message)}.")
    console.print(table)
    counts = [f"{sum(one.status == status for one in findings)} {status}" for status in COLORS]
    console.print(f"Doctor: {', '.join(counts)}.")


TIMEOUT_SECONDS = 180.0  # Time limit of all checks together.
CHECKS = (
    DoctorCheck("devices", check_devices, 60.0, "check whether another process uses the devices", needs_mesh=False),
    DoctorCheck("settings", check_settings, 60.0, "check whether the disk or the network hangs", when="full"),
    DoctorCheck(
        "kernel", check_kernel, 60.0, "set --config.model.attention=blockwise, which is slower, and report the kernel"
    ),
    DoctorCheck("decoding", check_decoding, 90.0, "report the problem with the name of the device"),
    DoctorCheck(
        "collectives",
        check_collectives,
        90.0,
        "on GPUs, inspect the output of NCCL_DEBUG=INFO, and check that all hosts run the doctor",
    ),
    DoctorCheck("checkpoint", check_checkpoint, 60.0, "check whether the disk of workdir hangs or is full"),
    DoctorCheck("servers", check_generations, 80.0, "see the server logs", when="short"),
    DoctorCheck("servers", check_weights, 120.0, "see the server logs", when="full"),
    DoctorCheck("judge", check_judge, 80.0, "see the log of the judge's server", needs_mesh=False, uses_devices=False),
    DoctorCheck(
        "seconds of a step",
        check_step,
        150.0,
        "use python -m poly_epo_jax.bench, which has no time limit",
        status_on_timeout="skipped",
        when="full",
    ),
)


def run(config: Config, flags: argparse.Namespace) -> None:
    """Runs the checks, prints the table, and exits with status 1 if a check failed.

    The output file is replaced after each check. SIGTERM ends the command after the table of the checks until then.

    Args:
      config: Configuration of the run.
      flags: Parsed command-line flags of this command.

    Raises:
      ValueError: If the processes cannot connect to each other.
      OSError: If the output file cannot be written.
      SystemExit: If a check failed, or SIGTERM was received.
    """
    if flags.output:
        check_writable("--output", flags.output.parent)
    hosts.join(config.hosts)
    configure_compiler(config)
    console, findings = Console(), list[Finding]()
    runner = CheckRunner(RunContext(config), TIMEOUT_SECONDS)
    checks = [check for check in CHECKS if check.when in ("both", "short" if flags.short else "full")]
    try:
        with console.status("") as status:
            for number, check in enumerate(checks, start=1):
                status.update(f"doctor: {check.name} ({number} of {len(checks)})")
                _run_check(runner, check, findings, flags.output)
    finally:
        if runner.is_reporter:
            show_findings(findings, console)
    if runner.is_reporter and flags.output:
        console.print(f"Written to {flags.output}.")
    sys.stdout.flush()
    failed = [one.name for one in findings if one.status == "failed"]
    if failed and runner.is_reporter:
        print(f"Error: failed: {', '.join(failed)}; see the table for details and remedies.", file=sys.stderr)
    if runner.timed_out:
        os._exit(bool(failed))  # A thread that is blocked in a device call would prevent a normal exit.
    if failed:
        sys.exit(1)


def _run_check(runner: CheckRunner, check: DoctorCheck, findings: list[Finding], output: Path | None) -> None:
    """Adds the findings of a check, and writes all findings. A check that SIGTERM or Ctrl-C ends is also a finding."""
    try:
        findings += runner.findings(check)
    except (SystemExit, KeyboardInterrupt):
        findings.append(
            Finding(check.name, check.status_on_timeout, "the check was interrupted by a signal; run the doctor again")
        )
        raise
    finally:
        if output and runner.is_reporter:
            write_json(output, list(map(dataclasses.asdict, findings)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code."""
    parser = config_parser(__doc__)
    parser.add_argument("--short", action="store_true", help="run only quick checks that do not modify the servers")
    parser.add_argument("--output", type=user_path, metavar="FILE", help="write the table as JSON to this file")
    # Exiting normally removes temporary folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run_command(parser, arguments, run, hosts.HostError)


if __name__ == "__main__":
    sys.exit(main())
