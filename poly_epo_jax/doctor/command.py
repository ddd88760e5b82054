"""The doctor's checks in order, and the command that runs them."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from poly_epo_jax.bench.console import write_figures
from poly_epo_jax.config.keys import Config
from poly_epo_jax.doctor.collectives import check_collectives
from poly_epo_jax.doctor.decoding import check_decoding
from poly_epo_jax.doctor.devices import check_devices, check_kernel
from poly_epo_jax.doctor.disk import check_checkpoint
from poly_epo_jax.doctor.examine import Check, Examination, Finding, Seen, Subject
from poly_epo_jax.doctor.judge import check_judge
from poly_epo_jax.doctor.servers import check_answers, check_weights
from poly_epo_jax.doctor.step import check_step
from poly_epo_jax.parallel import hosts
from poly_epo_jax.startup.prepare import prepare


def check_settings(subject: Subject) -> Seen:
    """Checks folders, data, lengths and the memory plan."""
    task = prepare(subject.config).task
    train, held_out = len(task.train_problems), len(task.held_out_problems)
    figures = {"training problems": train, "held-out problems": held_out}
    return f"folders, lengths and memory fit; {train:,} training and {held_out:,} held-out problems", figures


COLORS = {"passed": "green", "failed": "bold red", "not there": "dim"}
WIDTH = 110  # at least, even if the output is a file


def show(findings: Sequence[Finding], console: Console) -> None:
    """Prints a line for each finding, and the number of each kind."""
    console.width = max(console.width, WIDTH)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("check", max_width=32, overflow="fold")
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("what was seen, and what to do")
    for one in findings:
        color = COLORS[one.status]
        table.add_row(escape(one.name), f"[{color}]{one.status}[/]", f"{one.seconds:.1f}", f"{escape(one.seen)}.")
    console.print(table)
    counts = [f"{sum(one.status == status for one in findings)} {status}" for status in COLORS]
    console.print(f"Doctor: {', '.join(counts)}.")


SECONDS = 180.0  # for all checks together
CHECKS = (
    Check("devices", check_devices, 60.0, "see what holds them, such as another process", needs_mesh=False),
    Check("settings", check_settings, 60.0, "see whether the disk or the network hangs", when="full"),
    Check("kernel", check_kernel, 60.0, "set --config.model.attention=blockwise, which is slower, and report it"),
    Check("decoding", check_decoding, 90.0, "report it with the device's name"),
    Check("collectives", check_collectives, 90.0, "on GPUs look at NCCL_DEBUG=INFO, and see that all hosts run this"),
    Check("checkpoint", check_checkpoint, 60.0, "see whether the disk of workdir hangs, or is full"),
    Check("servers", check_answers, 80.0, "see their logs", when="short"),
    Check("servers", check_weights, 120.0, "see their logs", when="full"),
    Check("judge", check_judge, 80.0, "see its log", needs_mesh=False),
    Check(
        "seconds of a step",
        check_step,
        150.0,
        "python -m poly_epo_jax.bench takes its time",
        late="not there",
        when="full",
    ),
)


def run(config: Config, is_short: bool, output: Path | None) -> None:
    """Runs the checks, shows the table, and ends the process with 1 if a check has failed.

    Raises:
      ValueError, OSError: the hosts do not find each other, or `output` cannot be written.
    """
    hosts.join(config.hosts)
    jax.config.update("jax_compilation_cache_dir", str(Path(config.compilation_cache).absolute()))
    console, findings = Console(), list[Finding]()
    examination = Examination(Subject(config), SECONDS)
    checks = [check for check in CHECKS if check.when in ("both", "short" if is_short else "full")]
    with console.status("") as status:
        for place, check in enumerate(checks, start=1):
            status.update(f"doctor: {check.name} ({place} of {len(checks)})")
            findings += examination.findings(check)
    if examination.is_told:
        show(findings, console)
        if output is not None:
            write_figures(output, list(map(dataclasses.asdict, findings)), console)
    sys.stdout.flush()
    failed = [one.name for one in findings if one.status == "failed"]
    if failed and examination.is_told:
        print(f"Error: failed: {', '.join(failed)}; the table says what was seen and what to do.", file=sys.stderr)
    if examination.hanging:
        os._exit(bool(failed))  # a thread that hangs inside a device would keep the process alive
    if failed:
        sys.exit(1)
