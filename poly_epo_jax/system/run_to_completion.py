"""Awaits work, or the end of cancelled tasks, even if the waiting task is cancelled."""

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_completion(work: Awaitable[T]) -> T:
    """Awaits work that must not be interrupted.

    Args:
      work: A coroutine, task or future.

    Returns:
      The result of the work.

    Raises:
      CancelledError: If the caller is cancelled. It is raised after the work has finished.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancels tasks once, and waits until they have ended, also if the waiting task is cancelled."""
    for task in tasks:
        task.cancel()
    await run_to_completion(asyncio.gather(*tasks, return_exceptions=True))
