"""Patches google-jetstream 0.2.2 so that it runs in the trainer's process and with current releases of JAX.

JetStream is archived, and 0.2.2 is its last release. The patches are applied when this module is imported. No other
module may import jetstream before that. The patches address these problems:

- jetstream.engine imports seqio, which requires TensorFlow, for the vocabulary of text requests. Two empty classes
  replace the imported names, and text requests are rejected.
- orchestrator.delete_pytree calls jax.tree_map, which was removed from JAX, so that the first request would fail.
- The orchestrator sets the root logger to DEBUG, adds a handler to it, and logs several lines per token.
- JetThread kills the process on any error. With the patch, an error stops the driver and is raised to all callers that
  wait for results.
- Some threads are not daemon threads, so that a process that fails would wait for them forever.
- The generating thread asserts that a slot is occupied, which fails if another thread has just freed the last slot.
- Stopping a driver busy-waits, and removes stop messages from the queues before the threads have read them.
- A text request would stop the driver, and prompts that are too long are truncated silently. With the patch, requests
  are validated by `check(token_ids)` of the engine, which raises ValueError.
- The server listens on all network interfaces without authentication. With the patch, it listens on 127.0.0.1.
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
    """Verifies that google-jetstream is installed in the supported version.

    Raises:
      ConfigError: If it is missing or has another version. The message contains the installation command.
    """
    try:
        found = f"version {importlib.metadata.version('google-jetstream')} is installed"
    except importlib.metadata.PackageNotFoundError:
        found = "none is installed"
    if found != f"version {VERSION} is installed":
        raise ConfigError(
            f"rollouts.name='jetstream' requires google-jetstream {VERSION}, but {found}; run bash "
            "third_party/jetstream/setup.sh."
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
    from jetstream.engine import engine_api, token_utils, tokenizer_api  # pyright: ignore

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
    """JetStream driver that stops at its first error, and raises it to all pending and later requests."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._failing = threading.Lock()
        self._failure: tuple[str, Exception] | None = None
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()  # Channels of the requests in progress.
        super().__init__(*args, **kwargs)

    def place_request_on_prefill_queue(self, request: Any) -> None:
        """Queues a request that consists of token ids.

        Raises:
          ValueError: If the request is text, or the engine rejects it.
          RuntimeError: If the driver has failed.
        """
        if isinstance(request.prefill_content, str):
            raise ValueError("Text requests are not supported; send token ids (DecodeRequest.token_content).")
        self._prefill_engines[0].check(request.prefill_content)
        with self._failing:
            if self._failure:
                raise self._driver_error()
            self._channels.add(request.return_channel)
        super().place_request_on_prefill_queue(request)

    def stop(self) -> None:
        """Stops the threads. Requests in progress never receive a response."""
        self.live = False
        backlogs = [self._prefill_backlog, *self._transfer_backlogs]
        backlogs += [*self._generate_backlogs.values(), *self._detokenize_backlogs]
        for thread in self._all_threads:
            while thread.is_alive():
                for backlog in backlogs:
                    try:
                        backlog.put_nowait(None)  # Wakes the thread that reads from this queue.
                    except queue.Full:
                        with contextlib.suppress(queue.Empty):
                            backlog.get_nowait()  # Unblocks the thread that writes to this queue.
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
                    channel.set_exception(self._driver_error())

    def _driver_error(self) -> RuntimeError:
        assert self._failure
        thread, error = self._failure
        error_to_raise = RuntimeError(f"JetStream's thread {thread} failed with {type(error).__name__}: {error}")
        error_to_raise.__cause__ = error
        return error_to_raise


orchestrator.delete_pytree = _delete_pytree
orchestrator.JetThread = _DaemonThread
orchestrator.Driver = Driver
server_lib._HOST = "127.0.0.1"
_log = logging.getLogger("jetstream")
_log.setLevel(logging.ERROR)
for _module in (orchestrator, server_lib, token_utils):
    _module.logging = _log
