"""Coordination of several training processes, one per host. With a single process, all functions are trivial.

Each process generates, grades and judges a share of the prompts. The processes then exchange the results. All further
computations are the same on all processes, so that each process issues the same collectives in the same order. Work
that may fail on a single process runs in `barrier`, `gather`, `run_on_first`, `run_on_all` or `gather_from_all`, which
raise an error on all processes if it fails on one. Work that contains collectives runs in `collective`, because the
other processes may be blocked in a collective when one process fails.
"""

import asyncio
import atexit
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from poly_epo_jax.config.keys import HostsSection
from poly_epo_jax.parallel.coordinator import bind_address, check_port
from poly_epo_jax.parallel.devices import find_devices
from poly_epo_jax.system.signals import Stopped
from poly_epo_jax.system.text import first_line

T = TypeVar("T")

HEARTBEAT_TIMEOUT_SECONDS = 30
"""Heartbeat timeout in seconds. When a process misses its heartbeats for this long, the JAX runtime terminates the
other processes."""
SHUTDOWN_TIMEOUT_SECONDS = 10
"""Time in seconds that an exiting process waits for the other processes to exit."""


class HostError(RuntimeError):
    """Raised when another process has raised an error. The message contains its number and its error."""


def join(section: HostsSection) -> None:
    """Connects this process to the other processes. Must be called before any device is used.

    Args:
      section: The `hosts` section of the configuration. Without a coordinator, nothing is done.

    Raises:
      ValueError: If the section is inconsistent, if the other processes cannot be reached, or if JAX finds no devices.
    """
    coordinator = section.coordinator_address
    if not coordinator:
        if section.num_processes != 1 or section.process_id != 0:
            raise ValueError(
                f"hosts.num_processes={section.num_processes} and hosts.process_id={section.process_id} require "
                "hosts.coordinator_address; set it to HOST:PORT of the first process, or remove all three keys to "
                "train with a single process."
            )
        return
    explicit: dict[str, Any] = {}
    if coordinator != "auto":
        if not 0 <= section.process_id < section.num_processes:
            raise ValueError(
                f"hosts.coordinator_address={coordinator} requires hosts.num_processes, the number of processes, and "
                "hosts.process_id, from 0 to hosts.num_processes - 1, but they are "
                f"{section.num_processes} and {section.process_id}; set both keys, or set "
                "hosts.coordinator_address=auto under SLURM or on a TPU pod."
            )
        explicit = {
            "coordinator_address": coordinator,
            "num_processes": section.num_processes,
            "process_id": section.process_id,
            "coordinator_bind_address": bind_address(coordinator),
        }
        if section.process_id == 0:
            check_port(coordinator)
    # On CPUs, the collectives of concurrently running programs would be confused with each other.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Ctrl-C terminates the process until training installs its own handler: there is nothing to save yet, and a
    # graceful exit would block on the other processes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stop_watchdog = _watchdog(section)
    try:
        jax.distributed.initialize(
            **explicit,
            initialization_timeout=section.init_timeout_seconds,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        stop_watchdog()
        raise ValueError(
            f"Failed to connect to the other processes with hosts.coordinator_address={coordinator}: "
            f"{first_line(error)}. "
            "Under SLURM, start all processes with srun. Otherwise, set hosts.coordinator_address to HOST:PORT of the "
            "first process, and set hosts.num_processes and hosts.process_id."
        ) from error
    find_devices()  # before the exchanges between the processes, which use the devices


def count() -> int:
    """Returns the number of processes."""
    return jax.process_count()


def is_first() -> bool:
    """Returns True on the first process, which writes logs, output and files that must exist only once."""
    return index() == 0


def index() -> int:
    """Returns the number of this process, starting at 0."""
    return jax.process_index()


def share(items: Sequence[T]) -> Sequence[T]:
    """Returns the part of `items` that this process handles. Concatenated in process order, the parts equal `items`."""
    return items[len(items) * index() // count() : len(items) * (index() + 1) // count()]


async def barrier(work: Awaitable[T]) -> T:
    """Awaits the work of this process, then waits for the work of all processes, and returns the local result.

    Raises:
      HostError: If the work failed on another process only. A local error is raised unchanged.
      Stopped: If the work of another process was stopped.
    """
    result, error = await _attempt(work)
    await asyncio.to_thread(_agree, None, error)
    return result


async def gather(work: Awaitable[T]) -> list[T]:
    """Awaits the work of this process, and returns the results of all processes, in order of processes.

    Raises:
      HostError: If the work failed on another process only. A local error is raised unchanged.
      Stopped: If the work of another process was stopped.
    """
    return await asyncio.to_thread(_agree, *await _attempt(work))


async def collective(work: Awaitable[T]) -> T:
    """Awaits work that contains collectives, and returns its result.

    With several processes, a process on which the work fails exits immediately, and the JAX runtime then terminates the
    other processes. With a single process, the error is raised unchanged.
    """
    try:
        return await work
    except Exception as error:
        if count() == 1:
            raise
        traceback.print_exception(error)
        _end(f"failed in a computation of all processes: {first_line(error)}")


def run_on_first(function: Callable[[], T]) -> T:
    """Calls a function on the first process only, and returns its result on all processes.

    Raises:
      HostError: If the call failed, on processes other than the first. The first process raises the error unchanged.
    """
    return gather_from_all(lambda: function() if is_first() else None)[0]  # pyright: ignore[reportReturnType]


def run_on_all(function: Callable[[], T]) -> T:
    """Calls a function on all processes, waits until all calls have returned, and returns the local result.

    Raises:
      HostError: If the call failed on another process only. A local error is raised unchanged.
    """
    result, error = _outcome(function)
    _agree(None, error)
    return result


def gather_from_all(function: Callable[[], T]) -> list[T]:
    """Calls a function on all processes, and returns the results of all processes, in order of processes.

    Raises:
      HostError: If the call failed on another process only. A local error is raised unchanged.
    """
    return _agree(*_outcome(function))


def total(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums the counters of all processes by name. A missing counter is 0."""
    return {name: sum(one.get(name, 0) for one in counts) for name in set().union(*counts)}


async def _attempt(work: Awaitable[T]) -> tuple[Any, Exception | None]:
    try:
        return await work, None
    except Exception as error:  # `_agree` raises all errors, on every process.
        return None, error


def _outcome(function: Callable[[], T]) -> tuple[Any, Exception | None]:
    """Calls a function like `_attempt` awaits work."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _agree(result: Any, error: Exception | None) -> list[Any]:
    """Returns the results of all processes. Raises if any process has an error instead."""
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
    """Exchanges byte strings of different lengths, and returns those of all processes in order."""
    try:
        lengths = multihost_utils.process_allgather(np.array(len(own), np.int32))
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(own)] = np.frombuffer(own, np.uint8)
        rows = multihost_utils.process_allgather(padded)
    except (ValueError, RuntimeError) as error:  # The type and message of the error depend on the backend.
        _end(f"lost its connection to the other processes: {first_line(error)}")
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def _end(reason: str) -> NoReturn:
    """Exits immediately with status 1 and without saving.

    The other processes are unreachable or blocked in a collective. `_watchdog` then prints the error message.
    """
    print(f"Process {index()} {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _watchdog(section: HostsSection) -> Callable[[], None]:
    """Starts a shell process that prints an error message if this process is aborted.

    The JAX runtime aborts a process that loses its connection to the others, without running exit handlers. The shell
    reads from a pipe that only this process has open. If the pipe closes before a line was written to it, the shell
    prints the message. The returned function writes this line; it also runs at regular exit.
    """
    name = (
        "this process"
        if section.coordinator_address == "auto"
        else f"process {section.process_id} of {section.num_processes}"
    )
    message = (
        f"Error: {name} was terminated, could not connect to the other processes within "
        f"{section.init_timeout_seconds} s, or lost one of them; see the logs of all processes. Restart all "
        "processes to resume from the last checkpoint."
    )
    watcher = subprocess.Popen(
        ["sh", "-c", 'read -r word; [ "$word" = ended ] || echo "$0" >&2', message],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Prevents Ctrl-C from terminating the shell first.
    )

    def end() -> None:
        if watcher.poll() is None:
            watcher.communicate(b"ended\n")

    # This handler must run before JAX disconnects from the other processes, which also happens at exit.
    atexit.register(end)
    return end
