"""Several processes, one per host, that train as one; with a single process everything here is trivial.

Each process generates, grades and judges a share of the prompts. They exchange the results, and from there on all do
the same work on the same data, so that the collectives of one process always meet those of the others. Work that may
fail on one process alone goes through `barrier`, `gather` or `on_first`, which raise on every process what was raised
on one. Work that contains collectives goes through `collective`, because the others could be waiting inside it.
"""

import asyncio
import atexit
import ipaddress
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from poly_epo_jax.config.keys import HostsSection
from poly_epo_jax.system.signals import Stopped
from poly_epo_jax.system.text import first_line

T = TypeVar("T")

HEARTBEAT_SECONDS = 30
"""A process that is silent for this long counts as dead, and JAX's runtime ends the others."""
GOODBYE_SECONDS = 10
"""How long a process that ends waits for the others to end as well."""


class HostError(RuntimeError):
    """An error that was raised on another process."""


def join(section: HostsSection) -> None:
    """Connects this process with the others, as `config.hosts` says. Must come before anything that uses a device.

    Raises:
      ValueError: the section is wrong, or nothing says who the others are.
    """
    coordinator = section.coordinator
    if not coordinator:
        if section.count != 1 or section.index != 0:
            raise ValueError(
                f"hosts.count={section.count} and hosts.index={section.index} need hosts.coordinator, without which "
                "this process would train alone; set it to HOST:PORT of the first, or leave all three out."
            )
        return
    explicit: dict[str, Any] = {}
    if coordinator != "auto":
        _check(section)
        explicit = {"coordinator_address": coordinator, "num_processes": section.count, "process_id": section.index}
        explicit["coordinator_bind_address"] = _bind_address(coordinator)
    # On CPUs the collectives of programs that run at the same time would be mixed up.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Until training catches it, Ctrl-C has nothing to save, and would wait in vain for the other processes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    all_is_well = _watchdog(section)
    try:
        jax.distributed.initialize(
            **explicit,
            initialization_timeout=section.wait_seconds,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=GOODBYE_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        all_is_well()
        raise ValueError(
            f"hosts.coordinator={coordinator} does not lead to the other processes ({first_line(error)}); under "
            "SLURM, start them with srun, elsewhere set it to HOST:PORT of the first, with hosts.count and hosts.index."
        ) from error


def _check(section: HostsSection) -> None:
    if not 0 <= section.index < section.count:
        raise ValueError(
            f"hosts.coordinator={section.coordinator} needs hosts.count, the number of processes, and hosts.index, "
            f"from 0 to one less, but they are {section.count} and {section.index}; set them, or "
            "hosts.coordinator=auto under SLURM and on TPU pods."
        )


def _bind_address(coordinator: str) -> str | None:
    """Where the first process listens for the others, which need no password: only at the address that they are given.

    None, which means every address that it has, if they are given a name, which may mean another address elsewhere, or
    an address that is not its own but leads to it.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.bind((str(address), 0))
    except (ValueError, OSError):
        return None
    return coordinator


def count() -> int:
    return jax.process_count()


def is_first() -> bool:
    """Whether this is the process that logs, shows and writes what should exist only once."""
    return index() == 0


def index() -> int:
    """This process's number, from 0."""
    return jax.process_index()


def share(items: Sequence[T]) -> Sequence[T]:
    """This process's part of the items; the parts of all processes, in order, are the whole."""
    return items[len(items) * index() // count() : len(items) * (index() + 1) // count()]


async def barrier(work: Awaitable[T]) -> T:
    """Does this process's part of what all do, and returns its own result once all are done.

    Raises:
      HostError: another process failed at its part. If this one did, its own error is raised.
    """
    result, error = await _attempt(work)
    await asyncio.to_thread(_agree, None, error)
    return result


async def gather(work: Awaitable[T]) -> list[T]:
    """Does this process's part, and returns the results of all, in the order of processes.

    Raises:
      HostError: another process failed at its part. If this one did, its own error is raised.
    """
    return await asyncio.to_thread(_agree, *await _attempt(work))


async def collective(work: Awaitable[T]) -> T:
    """Does what all do with collectives. If that fails on one of several processes, all of them end at once."""
    try:
        return await work
    except Exception as error:
        if count() == 1:
            raise
        traceback.print_exception(error)
        _end(f"failed where all compute together: {first_line(error)}")


def on_first(function: Callable[[], T]) -> T:
    """Returns or raises, on all processes, what the first process's call does; the others wait for it."""
    return on_each(lambda: function() if is_first() else None)[0]  # pyright: ignore[reportReturnType]


def on_all(function: Callable[[], T]) -> T:
    """Returns what the call returns here, once it has returned on all processes.

    Raises:
      HostError: the call raised on another process. If it did on this one, its own error is raised.
    """
    result, error = _outcome(function)
    _agree(None, error)
    return result


def on_each(function: Callable[[], T]) -> list[T]:
    """Returns what the call returns on every process, in the order of processes.

    Raises:
      HostError: the call raised on another process. If it did on this one, its own error is raised.
    """
    return _agree(*_outcome(function))


def total(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The sums of what every process counted."""
    return {name: sum(one[name] for one in counts) for name in counts[0]}


async def _attempt(work: Awaitable[T]) -> tuple[Any, Exception | None]:
    try:
        return await work, None
    except Exception as error:  # whatever it is, it is raised by _agree, here and everywhere
        return None, error


def _outcome(function: Callable[[], T]) -> tuple[Any, Exception | None]:
    """Like `_attempt`."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _agree(result: Any, error: Exception | None) -> list[Any]:
    """Every process's result, if none has an error instead."""
    if count() == 1:
        if error is not None:
            raise error
        return [result]
    failure = error if error is None or isinstance(error, Stopped) else str(error)
    outcomes = [pickle.loads(one) for one in _exchange(pickle.dumps((result, failure)))]
    if error is not None:
        raise error
    for process, (_, failure) in enumerate(outcomes):
        if isinstance(failure, Stopped):
            raise failure
        if failure is not None:
            raise HostError(f"Process {process} of {count()}: {failure}")
    return [result for result, _ in outcomes]


def _exchange(own: bytes) -> list[bytes]:
    """The bytes of every process."""
    try:
        lengths = multihost_utils.process_allgather(np.array(len(own), np.int32))
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(own)] = np.frombuffer(own, np.uint8)
        rows = multihost_utils.process_allgather(padded)
    except (ValueError, RuntimeError) as error:  # the type and the message depend on the backend
        _end(f"lost touch with the others: {first_line(error)}")
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def _end(why: str) -> NoReturn:
    """Ends at once, as there is no one to save with or to say goodbye to. _watchdog prints the last word."""
    print(f"Process {index()} {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _watchdog(section: HostsSection) -> Callable[[], None]:
    """Has a message printed if this process does not end by itself: JAX's runtime aborts it if it loses the others.

    A shell reads from a pipe that only this process holds, and waits for the line that says that all is well; the
    function that is returned writes this line.
    """
    name = "this process" if section.coordinator == "auto" else f"process {section.index} of {section.count}"
    message = (
        f"Error: {name} was ended from outside, or did not find the others in {section.wait_seconds} s, "
        "or one of them is gone, whose log says why. Start all of them again: they go on from the last checkpoint."
    )
    watcher = subprocess.Popen(
        ["sh", "-c", 'read -r word; [ "$word" = ended ] || echo "$0" >&2', message],
        stdin=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C does not end it first
    )

    def end() -> None:
        if watcher.poll() is None:
            watcher.communicate(b"ended\n")

    # This runs before JAX says goodbye to the others, which it does at exit as well.
    atexit.register(end)
    return end
