"""Calls the methods of episodes. Run as a script, it is a worker process that keeps the state of its episodes.

The command is `python -P episode_worker.py DESCRIPTOR BYTES`, with the descriptor of a connection and the memory limit
of the process. The first message contains the files of modules that cannot be imported by name, such as the file of
--config, and the pickled task. Each further message is a call, which is answered before the next one is read. Neither
this script nor its imports require JAX.
"""

import asyncio
import contextlib
import os
import pickle
import resource
import runpy
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from poly_epo_jax.system.user_code import traceback_file, user_line
from poly_epo_jax.types import EpisodeFailure, Interactive


class Episodes:
    """The running episodes of a task.

    Args:
      task: Starts the episodes.
    """

    def __init__(self, task: Interactive):
        self._task, self._running = task, dict[int, Any]()

    async def call(self, number: int, method: str, *arguments: Any) -> tuple[str, Any, str]:
        """Calls a method of an episode.

        Args:
          number: Number of the episode.
          method: "start" starts the episode, "close" also removes it.
          arguments: Arguments of the method.

        Returns:
          "", the returned value, which for "start" is the name of the episode's class, and "", or the kind, the reason
          and the traceback's file of a failure, see `types.EnvironmentFailure`.
        """
        try:
            if method == "start":
                self._running[number] = self._task.start(*arguments)
                return "", type(self._running[number]).__name__, ""
            episode = self._running.pop(number) if method == "close" else self._running[number]
            return "", await getattr(episode, method)(*arguments), ""
        except EpisodeFailure as error:
            return "failed", f"failed: {error}", ""
        except BaseException as error:  # SystemExit would end the event loop or the process.
            return "raised", f"raised {type(error).__name__}{user_line(error)}: {error}", traceback_file(error)


def _exit_with(parent: int) -> None:
    """Ends this process soon after its parent, also during a call that never returns."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _load(files: dict[str, str]) -> None:
    """Executes files under the names of their modules, as `startup.config_file` does."""
    for name, file in files.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(runpy.run_path(file, run_name=name))


def main() -> None:
    """Sets the memory limit, and answers calls until the connection is closed."""
    if sys.platform == "linux":  # Other platforms do not support lowering this limit.
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = int(sys.argv[2]) if hard == resource.RLIM_INFINITY else min(int(sys.argv[2]), hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
    connection, loop = Connection(int(sys.argv[1])), asyncio.new_event_loop()
    try:
        files, task = connection.recv()
        _load(files)
        episodes = Episodes(pickle.loads(task))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send("")
    with contextlib.suppress(EOFError):
        while message := connection.recv():
            answer = loop.run_until_complete(episodes.call(*message))
            try:
                connection.send(answer)
            except Exception as error:  # The value cannot be pickled, so nothing was sent.
                connection.send(("raised", f"returned a value that cannot be pickled: {error}", ""))


if __name__ == "__main__":
    main()
