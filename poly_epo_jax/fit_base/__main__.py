"""Fits the base policy of a configuration and writes it as a Hugging Face folder, without training it.

    python -m poly_epo_jax.fit_base --config=configs/countdown.py --output=runs/models/countdown

The folder can be evaluated, or be the model.path of several runs. A training command with the same `base` and `task`
keys uses the same policy, which is fitted only once.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.model.hf_files import new_folder
from poly_epo_jax.model.policy import model_digest
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.startup.base_policy import base_policy
from poly_epo_jax.startup.command_line import config_parser, run_command
from poly_epo_jax.startup.prepare import check_writable, configure_compiler
from poly_epo_jax.startup.read_config import make_task
from poly_epo_jax.step.objective import DivergenceError
from poly_epo_jax.system.output_folder import user_path


def fit_base(config: Config, flags: argparse.Namespace) -> None:
    """Fits the base policy of a configuration, unless it is cached, and copies it to the folder of --output.

    Args:
      config: The configuration. Its `model.path` is empty.
      flags: Parsed command-line flags of this command. The folder can exist if it contains this policy.

    Raises:
      ConfigError: If --output is missing, if the configuration has a `model.path`, if the folder contains something
        else, or if it cannot be written to.
      ValueError: If the task has no demonstrations, or if the mesh does not fit the policy.
      DivergenceError: If the fit diverges.
    """
    folder = flags.output
    if folder is None:
        raise ConfigError("--output is missing; set it to the folder to create, such as --output=runs/models/base.")
    if config.model.path:
        raise ConfigError(f"model.path={config.model.path} is a complete policy; set --config.model.path= to fit one.")
    for key, path in {"--output": folder.parent, "base.cache_dir": Path(config.base.cache_dir)}.items():
        check_writable(key, path)
    configure_compiler(config)
    cached = base_policy(config, make_task(config.task), make_mesh(**config.mesh))
    if folder.exists() and model_digest(folder) != model_digest(cached):
        raise ConfigError(f"--output={folder} does not contain this base policy; choose a new folder, or delete it.")
    if not folder.exists():
        with new_folder(folder) as new:
            shutil.copytree(cached, new, dirs_exist_ok=True)
    print(f"policy: {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fits a base policy as specified by the command line (`sys.argv` if None), and returns the exit code."""
    parser = config_parser(__doc__)
    parser.add_argument("--output", type=user_path, metavar="FOLDER", help="Hugging Face folder to create")
    return run_command(parser, arguments, fit_base, DivergenceError)


if __name__ == "__main__":
    sys.exit(main())
