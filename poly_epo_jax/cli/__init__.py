"""The command `poly-epo`, also available as `python -m poly_epo_jax`. Runs the module of each command as a script."""

import os
import runpy
import sys
from collections.abc import Sequence

from poly_epo_jax.system.missing_packages import report_missing_packages
from poly_epo_jax.system.signals import exit_code
from poly_epo_jax.system.text import did_you_mean

COMMANDS = {
    "train": ("poly_epo_jax.main", "train a policy"),
    "evaluate": ("poly_epo_jax.evaluate", "evaluate and compare models on benchmarks"),
    "rejudge": ("poly_epo_jax.rejudge", "compare judges on recorded responses"),
    "audit": ("poly_epo_jax.audit", "audit the judge of a run on its logged generations"),
    "report": ("poly_epo_jax.report", "draw runs and evaluations on one page"),
    "check-run": ("poly_epo_jax.check_run", "compare a run with its recipe and with bands of seeds"),
    "study": ("poly_epo_jax.study", "compare methods over learning rates, seeds and tasks"),
    "fit-base": ("poly_epo_jax.fit_base", "fit a base policy without training it"),
    "export": ("poly_epo_jax.export", "write a policy as a Hugging Face folder"),
    "doctor": ("poly_epo_jax.doctor", "check devices, servers and disk for a run"),
    "bench": ("poly_epo_jax.bench", "time the stages of a step, or plan the memory of a run"),
    "recipes": ("poly_epo_jax.cli.recipes", "list and print the configuration and study files"),
    "explain": ("poly_epo_jax.cli.explain", "print the advantages of responses with four methods"),
}
"""Module and purpose of each command."""

EXAMPLES = """\
poly-epo explain --rewards 1,1,1,1,1,1,0,0 --strategies A,A,A,A,A,B,A,C
poly-epo train --config=polynomial:grpo
poly-epo report runs/polynomial-grpo"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (`sys.argv` if None) begin with. Returns 2 if there is no such command.

    Raises:
      SystemExit: When the command ends, with its exit code.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        return exit_code(lambda: print(_help()))
    if name == "--version":
        from poly_epo_jax.system.versions import installed_version

        print(f"poly-epo {installed_version('poly_epo_jax') or 'unknown'}")
        return 0
    if name not in COMMANDS:
        print(f"Error: poly-epo has no command {name}{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    # Configuration files can import modules next to them. The working folder may be the run of another person, so that
    # its modules do not replace installed packages, and are not imported by commands that execute no code of the user.
    if not sys.flags.safe_path and name not in ("report", "check-run", "export", "recipes", "explain"):
        sys.path.append(os.getcwd())
    sys.argv[1:] = rest
    report_missing_packages()
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    return 0


def _help() -> str:
    lines = ["usage: poly-epo COMMAND [FLAG ...]", "       poly-epo --version", ""]
    lines += [f"  {name:<9} {purpose:<56} python -m {module}" for name, (module, purpose) in COMMANDS.items()]
    lines += ["", "The commands on the right are equal. --help after a command lists its flags. Examples:", ""]
    return "\n".join([*lines, *(f"  {line}" for line in EXAMPLES.splitlines())])
