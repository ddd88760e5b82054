"""Calls of samplers, environments, rewards and judges that this process awaits, for progress displays."""

import contextlib
import time
from collections.abc import Iterator

MAX_SHOWN = 3  # maximum number of calls in a text

_pending: dict[object, str] = {}  # descriptions of the calls, in the order in which they began
_changed = 0.0  # time at which a call began or ended last


@contextlib.contextmanager
def pending_call(description: str) -> Iterator[None]:
    """Lists a call as pending during the context."""
    global _changed
    key = object()
    _pending[key], _changed = description, time.monotonic()
    try:
        yield
    finally:
        del _pending[key]
        _changed = time.monotonic()


def pending_calls() -> tuple[str, float]:
    """Returns the pending calls that began first as text, and the time in seconds since a call began or ended.

    The text is empty if no call is pending. May be called from any thread.
    """
    calls, seconds = list(_pending.values()), time.monotonic() - _changed
    others = f" and {len(calls) - MAX_SHOWN} more" if len(calls) > MAX_SHOWN else ""
    return ", ".join(calls[:MAX_SHOWN]) + others, seconds
