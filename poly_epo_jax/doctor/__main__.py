"""Checks whether a run can be trusted here: devices, kernels, collectives, disk, servers and judge, in three minutes.

python -m poly_epo_jax.doctor --config=configs/polaris.py:h200x8                before the first run on a machine
python -m poly_epo_jax.doctor --config=configs/polaris.py:h200x8 --short        what launch/ checks before training

Each check passes, fails, or finds that its subject is not there. A failure says what to do, and makes the exit code 1.
The short form leaves the servers' weights as they are, and times nothing. The full form pushes the weights that the run
would begin with to the servers, as the run's own first step does; do not run it while others use the servers.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from poly_epo_jax.config.keys import Config
from poly_epo_jax.doctor.command import run
from poly_epo_jax.parallel import hosts
from poly_epo_jax.startup.command_line import parse_flags, run_command
from poly_epo_jax.startup.prepare import check_writable

SHORT = flags.DEFINE_bool("short", False, "Only what takes seconds and leaves servers as they are.")
OUTPUT = flags.DEFINE_string("output", "", "Where the table is written as JSON; empty: nowhere.")


def _run(config: Config) -> None:
    if OUTPUT.value:
        check_writable("--output", Path(OUTPUT.value).parent)
    run(config, SHORT.value, Path(OUTPUT.value) if OUTPUT.value else None)


def main(argv: Sequence[str]) -> None:
    # So that temporary folders are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run_command(_run, argv, hosts.HostError)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
