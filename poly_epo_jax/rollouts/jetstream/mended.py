"""google-jetstream 0.2.2, with fixes for everything that keeps it from running alongside a trainer on today's JAX.

JetStream is archived: this is its last release. It is patched from outside, once, when this module is imported.
Nothing else may import jetstream before that. The patches address these problems:

- seqio would bring in TensorFlow, for the vocabulary of text requests. Such requests are refused; two empty classes
  stand in for the names that jetstream.engine imports.
- orchestrator.delete_pytree calls jax.tree_map, which JAX no longer has: the first request would end in an error.
- The orchestrator sets the root logger to DEBUG, adds a handler to it, and logs several lines per token through it.
- JetThread kills the process on any error. Here an error ends the driver, and is raised to everyone who waits.
- Some of its threads are not daemons: a program that ends with an error would wait for them for ever.
- The generating thread asserts that a slot is taken, which is wrong if another thread has just freed the last one.
- Stopping a driver spins, and removes the stop messages from the queues before the threads have read them.
- A text request would end the driver, and a request that is too long is truncated silently. Engines refuse what they
  cannot serve: `check(token_ids)` raises a ValueError.
- The server listens on all interfaces, without authentication.
"""

import contextlib
import importlib.metadata
import logging
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax

from poly_epo_jax.config.keys import ConfigError

VERSION = "0.2.2"


def _check_version() -> None:
    """Refuses a google-jetstream that is missing or of another version.

    Raises:
      ConfigError: the message says what to install.
    """
    try:
        found = f"version {importlib.metadata.version('google-jetstream')} is installed"
    except importlib.metadata.PackageNotFoundError:
        found = "none is installed"
    if found != f"version {VERSION} is installed":
        raise ConfigError(
            f"rollouts.name='jetstream' needs google-jetstream {VERSION}, and {found}; in the repository run: bash "
            "third_party/jetstream/setup.sh; elsewhere install this package's extra 'jetstream', and run: pip install "
            f"--no-deps google-jetstream=={VERSION}"
        )


def _stand_in_for_seqio() -> None:
    package, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
    for name in ("Vocabulary", "SentencePieceVocabulary"):
        setattr(vocabularies, name, type(name, (), {}))
    sys.modules.setdefault("seqio", package)
    sys.modules.setdefault("seqio.vocabularies", vocabularies)


@contextlib.contextmanager
def _root_logger_kept():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


_check_version()
_stand_in_for_seqio()
with _root_logger_kept():
    from jetstream.core import config_lib, orchestrator, server_lib  # pyright: ignore[reportMissingImports]
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc  # pyright: ignore[reportMissingImports]
    from jetstream.engine import engine_api, token_utils, tokenizer_api  # pyright: ignore[reportMissingImports]

__all__ = [
    "Driver",
    "config_lib",
    "engine_api",
    "jetstream_pb2",
    "jetstream_pb2_grpc",
    "orchestrator",
    "server_lib",
    "tokenizer_api",
]


def _delete_pytree(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


class _DaemonThread(threading.Thread):
    def __init__(self, **arguments: Any):
        arguments["daemon"] = True
        super().__init__(**arguments)


class Driver(orchestrator.Driver):
    """JetStream's driver, except that its first error ends it and is raised to all waiting and all later requests."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._failing = threading.Lock()
        self._failure: tuple[str, Exception] | None = None
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()  # on which someone waits for tokens
        super().__init__(*args, **kwargs)

    def place_request_on_prefill_queue(self, request: Any) -> None:
        """Accepts a request that consists of token ids.

        Raises:
          ValueError: it is text, or the engine refuses it.
          RuntimeError: the driver has failed.
        """
        if isinstance(request.prefill_content, str):
            raise ValueError("The request is text; send token ids (DecodeRequest.token_content).")
        self._prefill_engines[0].check(request.prefill_content)
        with self._failing:
            if self._failure:
                raise self._told()
            self._channels.add(request.return_channel)
        super().place_request_on_prefill_queue(request)

    def stop(self) -> None:
        """Ends the threads. Requests still in progress are never answered."""
        self.live = False
        backlogs = [self._prefill_backlog, *self._transfer_backlogs]
        backlogs += [*self._generate_backlogs.values(), *self._detokenize_backlogs]
        for thread in self._all_threads:
            while thread.is_alive():
                for backlog in backlogs:
                    try:
                        backlog.put_nowait(None)  # for the thread that reads
                    except queue.Full:
                        with contextlib.suppress(queue.Empty):
                            backlog.get_nowait()  # makes room for the thread that writes
                thread.join(timeout=0.02)

    def _prefill_thread(self, idx: int) -> None:
        self._watch(super()._prefill_thread, idx)

    def _transfer_thread(self, idx: int) -> None:
        self._watch(super()._transfer_thread, idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._watch(super()._detokenize_thread, idx)

    def _generate_thread(self, idx: int) -> None:
        self._watch(self._generate_again, idx)

    def _generate_again(self, idx: int) -> None:
        """Restarts the thread's loop if it found all slots free. No slot holds a request then, so nothing is lost."""
        while True:
            try:
                return super()._generate_thread(idx)
            except AssertionError as error:
                if not str(error).startswith("At this point we must have some requests inserted"):
                    raise

    def _watch(self, thread: Callable[[int], None], idx: int) -> None:
        try:
            thread(idx)
        except Exception as error:
            with self._failing:
                self.live = False
                self._failure = self._failure or (threading.current_thread().name, error)
                for channel in list(self._channels):
                    channel.set_exception(self._told())

    def _told(self) -> RuntimeError:
        assert self._failure
        thread, error = self._failure
        told = RuntimeError(f"JetStream's thread {thread} failed with {type(error).__name__}: {error}")
        told.__cause__ = error
        return told


orchestrator.delete_pytree = _delete_pytree
orchestrator.JetThread = _DaemonThread
orchestrator.Driver = Driver
server_lib._HOST = "127.0.0.1"
_log = logging.getLogger("jetstream")
_log.setLevel(logging.ERROR)
for _module in (orchestrator, server_lib, token_utils):
    _module.logging = _log
