"""Handles Ctrl-C so that nothing swallows it."""

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from types import FrameType

AGAIN_AFTER = 0.01  # seconds

_collecting = False


@contextlib.contextmanager
def heard_ctrl_c() -> Iterator[None]:
    """Within this context Ctrl-C raises KeyboardInterrupt as usual, but never where Python would report and forget it.

    Python does that during a garbage collection, where JAX has a callback, and in code that runs when an object is
    destroyed; Ctrl-C then waits. If Ctrl-C does something else, or nothing (nohup), that does not change, and neither
    does anything outside the main thread.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    gc.callbacks.insert(0, _begins)
    gc.callbacks.append(_ends)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, _receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        put_off, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        gc.callbacks.remove(_begins)
        gc.callbacks.remove(_ends)
        if put_off:
            raise KeyboardInterrupt


def _begins(phase: str, _: dict[str, int]) -> None:
    global _collecting
    if phase == "start":
        _collecting = True


def _ends(phase: str, _: dict[str, int]) -> None:
    global _collecting
    if phase == "stop":
        _collecting = False


def _receive(_: int, frame: FrameType | None) -> None:
    if _collecting or _is_called_in_passing(frame):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_AFTER)
    else:
        raise KeyboardInterrupt


def _is_called_in_passing(frame: FrameType | None) -> bool:
    """Whether a frame or one of its callers is a callback of the collector or of a weak reference, or a destructor."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if code in callbacks or code.co_name == "__del__" or module in ("weakref", "_weakrefset"):
            return True
        frame = frame.f_back
    return False
