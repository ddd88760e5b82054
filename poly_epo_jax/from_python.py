"""Trains from a script or a notebook, with a configuration created in Python. Equivalent to `poly_epo_jax.main`.

from poly_epo_jax import get_config, run

config = get_config("grpo")  # the string after a configuration file's name; or call get_config of your own file
config.train.num_steps = 20
folder = run(config)
"""

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ml_collections import ConfigDict

from poly_epo_jax import main
from poly_epo_jax.config.default import get_config
from poly_epo_jax.config.keys import Config
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.signals import StopSignal, deliver_keyboard_interrupt

__all__ = ["get_config", "run"]


def run(config: ConfigDict) -> Path:
    """Trains a policy to the last step. Resumes the run in `config.workdir` if it has a checkpoint.

    Args:
      config: The configuration, from `get_config` of this module or of a configuration file.

    Returns:
      The run folder, see records/run_folder.py.

    Raises:
      ValueError, OSError, ImportError: If the configuration cannot run. The message states the reason and the remedy.
      SystemExit: If a script receives SIGTERM, SIGHUP or Ctrl-C. All completed steps are saved first.
      KeyboardInterrupt: If the kernel of a notebook is interrupted. All completed steps are saved first.
    """
    checked = read_config(config)
    with deliver_keyboard_interrupt():
        if _in_event_loop():
            _run_in_thread(checked)
        else:
            main.run(checked)
    return Path(checked.workdir)


def _run_in_thread(config: Config) -> None:
    """Trains in another thread. Ctrl-C is raised in this thread, which requests a shutdown and waits for the save."""
    stop = StopSignal()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(main.run, config, stop)
        try:
            running.result()
        except KeyboardInterrupt:
            stop.request(signal.SIGINT)
            running.exception()
            raise


def _in_event_loop() -> bool:
    """Returns True if this thread already runs an event loop, as in notebooks. It cannot run a second one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
