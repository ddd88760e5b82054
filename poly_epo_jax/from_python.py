"""Training from a script or a notebook: what `python -m poly_epo_jax.main` does, on a configuration made in Python.

from poly_epo_jax import get_config, run

config = get_config("grpo")  # the words after a configuration file's name; or get_config of a file of your own
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
from poly_epo_jax.system.signals import Stop, heard_ctrl_c

__all__ = ["get_config", "run"]


def run(config: ConfigDict) -> Path:
    """Trains to the end; continues the run in `config.workdir` if there is one to resume.

    Returns:
      The run folder, see records/run_folder.py.

    Raises:
      ValueError, OSError, ImportError: the configuration cannot run; the message says why and what to do.
      SystemExit: in a script, on a signal, once the steps trained so far are saved.
      KeyboardInterrupt: likewise in a notebook, when its kernel is interrupted.
    """
    checked = read_config(config)
    with heard_ctrl_c():
        if _in_event_loop():
            _run_in_thread(checked)
        else:
            main.run(checked)
    return Path(checked.workdir)


def _run_in_thread(config: Config) -> None:
    """Trains in another thread. Ctrl-C reaches this one, which passes it on and waits until training is saved."""
    stop = Stop()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(main.run, config, stop)
        try:
            running.result()
        except KeyboardInterrupt:
            stop.ask(signal.SIGINT)
            running.exception()
            raise


def _in_event_loop() -> bool:
    """Whether this thread already runs an event loop, as notebooks do: it cannot run another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
