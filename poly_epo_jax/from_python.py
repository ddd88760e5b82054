"""Trains from a script or a notebook, with a configuration created in Python. Equivalent to `poly_epo_jax.main`.

from poly_epo_jax import get_config, run

config = get_config(":grpo")  # the value of --config: "polynomial:grpo" is a recipe, ":grpo" the default configuration
config.train.num_steps = 20
folder = run(config)
"""

import gc
import traceback
from pathlib import Path

from ml_collections import ConfigDict

from poly_epo_jax import main
from poly_epo_jax.startup.command_line import load_config
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.signals import deliver_keyboard_interrupt

__all__ = ["get_config", "run"]


def get_config(recipe: str = "") -> ConfigDict:
    """Returns a configuration, which can be changed before it is passed to `run`.

    Args:
      recipe: Value of --config: the name of a recipe or the path of a configuration file, optionally followed by a
        method and a machine, as in "polynomial:grpo". Without a name, as in "" and ":grpo,h200x8", the default
        configuration is returned.

    Raises:
      ValueError: If the recipe, file, method or machine does not exist.
    """
    return load_config(recipe)


def run(config: ConfigDict) -> Path:
    """Trains a policy to the last step. Resumes the run in `config.workdir` if it has a checkpoint.

    Args:
      config: The configuration, from `get_config`.

    Returns:
      The run folder, see records/run_folder.py.

    Raises:
      ValueError, OSError, ImportError: If the configuration cannot run. The message states the reason and the remedy.
      JudgeError, DivergenceError, HostError: If training fails, see `train.train`.
      SystemExit: If a script receives SIGTERM, SIGHUP or Ctrl-C during training. All completed steps are saved first.
      KeyboardInterrupt: If the kernel of a notebook is interrupted, or if a script receives Ctrl-C before training
        starts. All completed steps are saved first.
    """
    checked = read_config(config)
    try:
        with deliver_keyboard_interrupt():
            main.run(checked)
    except BaseException as error:
        _release_memory(error)
        raise
    return Path(checked.workdir)


def _release_memory(error: BaseException) -> None:
    """Deletes the local variables of all frames in the traceback of an exception, including the training state.

    Notebooks keep the last exception and therefore its frames. Rerunning the cell would otherwise require the memory
    of the training state twice.
    """
    errors, found = [error], set[int]()
    while errors:
        one = errors.pop()
        found.add(id(one))
        traceback.clear_frames(one.__traceback__)
        related = (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
        errors += [other for other in related if other is not None and id(other) not in found]
    gc.collect()
