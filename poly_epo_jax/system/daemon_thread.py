"""Runs code that may never return, such as a user's reward function, without keeping the process alive."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Calls `function` in a daemon thread. Unlike with `asyncio.to_thread`, the process can exit during the call."""
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

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)
