"""Ctrl-C that nothing swallows."""

import gc
import signal
from types import FrameType

AGAIN_AFTER = 0.01  # seconds

_collecting = False


def catch_ctrl_c() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt as ever, but never where Python would report and forget it.

    That is so during a garbage collection, where JAX has a callback, and in what is called when an object goes. Where
    Ctrl-C is ignored (nohup), it remains so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        gc.callbacks.insert(0, _begins)
        gc.callbacks.append(_ends)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.signal(signal.SIGINT, _receive)


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
    """Whether a frame or one that called it is a callback of the collector or of weak references, or a destructor."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if code in callbacks or code.co_name == "__del__" or module in ("weakref", "_weakrefset"):
            return True
        frame = frame.f_back
    return False
