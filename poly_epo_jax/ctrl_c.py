"""Ctrl-C that no garbage collection swallows."""

import gc
import signal
from types import FrameType

AGAIN_AFTER = 0.01  # seconds


def catch_ctrl_c() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt as ever, but in no callback of the garbage collector.

    What is raised there, Python reports and forgets; JAX has such a callback. Where Ctrl-C is ignored (nohup), it
    remains so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.signal(signal.SIGINT, _receive)


def _receive(number: int, frame: FrameType | None) -> None:
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in callbacks:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_AFTER)
            return
        frame = frame.f_back
    raise KeyboardInterrupt
