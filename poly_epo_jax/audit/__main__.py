"""Audits the judge of a run on its logged generations, as `audit.every` does during the run.

    poly-epo audit runs/polaris-poly_epo --config=polaris --config.audit.judge.name=llm \\
        --config.audit.judge.url=http://127.0.0.1:30011

--config must be the configuration of the run. Only missing audits are requested, so rerun the command to resume it.
Rows are appended to audit.jsonl in the run folder, and the results over all audited steps are printed. The report of
the run shows them over training.
"""

import os

if __name__ == "__main__":  # before the imports below
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # accelerators are left to the servers of the judges

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from poly_epo_jax.audit.auditor import Auditor, missing_audits, warn_of_failures
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.config.section import changed_keys
from poly_epo_jax.metrics.intervals import interval_text
from poly_epo_jax.metrics.judge_audit import AUDIT_METRICS, summarize
from poly_epo_jax.records.progress import progress_bar
from poly_epo_jax.records.run_folder import AUDIT, AUDITED, CONFIG, GENERATIONS, lock_run_folder, read_rows
from poly_epo_jax.startup.command_line import config_parser, run_command
from poly_epo_jax.startup.read_config import make_task
from poly_epo_jax.system.json_files import append_rows, read_object, read_rows as read_json_rows
from poly_epo_jax.system.output_folder import check_contents


def run_audit(config: Config, flags: argparse.Namespace) -> None:
    """Requests the missing audits of a run, and prints the results.

    Args:
      config: The configuration.
      flags: Parsed command-line flags of this command.

    Raises:
      ValueError, OSError: If the folder has no logged generations, another configuration or audits by another second
        judge, or is in use by a run. Completed audits are kept.
    """
    if not config.audit.every:
        raise ConfigError("audit.every=0 selects no steps; set it to a multiple of log.generations_every.")
    check_contents(flags.run)
    saved = read_object(flags.run / CONFIG, "restore it from a backup")
    changed = changed_keys(saved, json.loads(json.dumps(config.to_dict()))) if saved else []
    if changed := [
        key for key in changed if re.match(r"seed$|task\.|judge\.(name|model|options|verify)|algo\.set_size", key)
    ]:
        raise ConfigError(
            f"{', '.join(changed)} differ from {flags.run / CONFIG}; set --config to the configuration of the run."
        )
    steps = {row["step"] for row in read_rows(flags.run / GENERATIONS)}
    if not steps:
        raise ConfigError(f"{flags.run} has no logged generations; specify the folder of a training run.")
    auditor = Auditor(config, make_task(config.task))
    with lock_run_folder(flags.run):
        missing = list(missing_audits(flags.run, auditor, config.audit.every, max(steps)))
        if missing:
            print(auditor.cost(sum(len(groups) for _, groups in missing)))
        with progress_bar("audited steps", len(missing)) as show:
            for number, (step, of_step) in enumerate(missing, 1):
                append_rows(flags.run / AUDIT, asyncio.run(auditor.audit(step, of_step)))
                show(number)
    rows = list(read_json_rows(flags.run / AUDIT, AUDITED))
    warn_of_failures(rows)
    results = summarize(rows, config.algo.set_size)
    table = Table(
        "result",
        "mean [95% interval]",
        "prompts",
        title=f"{len(rows)} prompts, audited steps: {len({row['step'] for row in rows})}",
    )
    for name, (title, _) in AUDIT_METRICS.items():
        table.add_row(title, interval_text(results[name]), str(results[name]["num_problems"] if results[name] else 0))
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (`sys.argv` if None) and returns the exit code."""
    parser = config_parser(__doc__)
    parser.add_argument(
        "run", type=Path, metavar="RUN", nargs="?", default=Path("."), help="run folder (default: the current folder)"
    )
    return run_command(parser, arguments, run_audit, training=False)


if __name__ == "__main__":
    sys.exit(main())
