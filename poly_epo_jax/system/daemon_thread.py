"""Runs code that may never return, such as a user's reward function, without keeping the process alive."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Calls `function` in a daemon thread. Unlike with `asyncio.to_thread`, the process can exit during the call."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            # asyncio cannot raise StopIteration from a future, and SystemExit would end the event loop without cleanup.
            is_ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if is_ordinary else RuntimeError(f"{type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the result is not needed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return await future
