"""Runs code that may never return, such as a user's reward function, without keeping the process alive."""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

T = TypeVar("T")


_ABANDONED = "abandoned"


class LateCallError(ValueError):
    """Raised when a call of a user's code does not return in time."""


class ThreadError(OSError):
    """Raised when the operating system does not start a thread. It is not a failure of the user's code."""


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Calls `function` in a daemon thread. Unlike with `asyncio.to_thread`, the process can exit during the call.

    If the caller is cancelled, the thread continues, and `num_abandoned_threads` counts it until it ends.
    """
    thread, future = _start_thread(function)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        abandon(thread)
        raise


def call_with_timeout(function: Callable[[], T], timeout_seconds: float, name: str) -> T:
    """Calls `function` in a daemon thread, and returns its result. Blocks the event loop of the calling thread.

    Args:
      function: The user's code.
      timeout_seconds: Maximum time in seconds, the value of `rollouts.grading_timeout_seconds`.
      name: Name of the function in the error message.

    Raises:
      LateCallError: If the call does not return in time.
    """
    thread, future = _start_thread(function)
    try:
        return future.result(timeout_seconds)
    except TimeoutError:
        if future.done():  # raised by the function, or returned since then
            return future.result()
        abandon(thread)
        raise LateCallError(
            f"{name} did not return within rollouts.grading_timeout_seconds={timeout_seconds:g}; correct it."
        ) from None


def _start_thread(function: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
    future = Future[T]()
    future.set_running_or_notify_cancel()  # a call that has started is not cancelled

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as raised:
            # asyncio cannot raise StopIteration from a future, CancelledError would cancel the caller, and SystemExit
            # would end the event loop without cleanup.
            is_ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration | CancelledError)
            future.set_exception(raised if is_ordinary else RuntimeError(f"{type(raised).__name__}: {raised}"))

    return _started(threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)), future


def _started(thread: threading.Thread) -> threading.Thread:
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadError(
            f"Failed to start a thread: {error}. Increase the limit of processes (ulimit -u) and rerun the command."
        ) from error
    return thread


def abandon(thread: threading.Thread, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Marks a thread as one that its caller no longer waits for.

    Args:
      thread: The thread.
      loop: Event loop that the thread runs, and that a call blocks. When the call returns, the mark is removed.
    """
    name, thread.name = thread.name, _ABANDONED
    if loop is not None:
        loop.call_soon_threadsafe(setattr, thread, "name", name)


async def in_background_loop(work: Awaitable[T]) -> T:
    """Awaits user code in an event loop that runs in a daemon thread until the process ends.

    User code that blocks this loop does not block the caller's loop. All calls share the loop, because clients and
    semaphores of user code belong to one loop. If the caller is cancelled, `work` is cancelled. If `work` blocks the
    loop at that time, the loop is abandoned, and later calls run in a new one.
    """
    (loop, thread), running = _background_loop(), []

    async def call() -> T:
        running.append(task := asyncio.current_task())
        try:
            return await work
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as raised:
            # Unless the caller has been cancelled, they would end the loop, or cancel the caller.
            raise (
                raised if task and task.cancelling() else RuntimeError(f"{type(raised).__name__}: {raised}")
            ) from None

    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop))
    except asyncio.CancelledError:
        if asyncio.current_task(loop) in running:
            abandon(thread, loop)
            _background_loop.cache_clear()
        raise


@functools.cache
def _background_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    return loop, _started(threading.Thread(target=loop.run_forever, name="user code", daemon=True))


def num_abandoned_threads() -> int:
    """Returns the number of running threads whose callers no longer wait for them."""
    return sum(thread.name == _ABANDONED for thread in threading.enumerate())
