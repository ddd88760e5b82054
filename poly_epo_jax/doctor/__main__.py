"""Checks devices, kernels, collectives, disk, servers and judge with the configuration of a run, in three minutes.

python -m poly_epo_jax.doctor --config=configs/polaris.py:h200x8                before the first run on a machine
python -m poly_epo_jax.doctor --config=configs/polaris.py:h200x8 --short        the checks of launch/ before training

Each check passes, fails, or is skipped if its subject does not exist. A failed check prints a remedy, and the exit code
is then 1. The short form does not change the weights of the servers and does not measure times. The full form pushes
the initial weights of the run to the servers, like the first step of the run. Do not use it while other runs use the
servers.
"""

from poly_epo_jax.system.missing_packages import report_missing_packages

if __name__ == "__main__":
    report_missing_packages()  # before the imports below

import argparse
import signal
import sys
from collections.abc import Sequence

from poly_epo_jax.config.keys import Config
from poly_epo_jax.doctor.command import run
from poly_epo_jax.parallel import hosts
from poly_epo_jax.startup.command_line import config_parser, run_command
from poly_epo_jax.startup.prepare import check_writable
from poly_epo_jax.system.user_path import user_path


def _run(config: Config, flags: argparse.Namespace) -> None:
    if flags.output:
        check_writable("--output", flags.output.parent)
    run(config, flags.short, flags.output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code."""
    parser = config_parser(__doc__)
    parser.add_argument("--short", action="store_true", help="run only quick checks that do not modify the servers")
    parser.add_argument("--output", type=user_path, metavar="FILE", help="write the table as JSON to this file")
    # Exiting normally removes temporary folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run_command(parser, arguments, _run, hosts.HostError)


if __name__ == "__main__":
    sys.exit(main())
