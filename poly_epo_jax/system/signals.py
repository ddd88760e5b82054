"""Ends of commands: exit codes, Ctrl-C that no library can discard, and signals that end a run at a safe moment."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP", signal.SIGINT: "Ctrl-C"}


class Stopped(Exception):
    """This process, or another of the run, was asked to end."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return NAMES.get(signal.Signals(self.number), str(self.number))


class Stop:
    """Remembers the first signal. Outside `on_signals`, signals have their usual effect."""

    def __init__(self):
        self._number: int | None = None
        self._came = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def ask(self, number: int) -> None:
        """Has the effect of a signal; may be called from any thread."""
        if self._number is None:
            self._number = number
        loop = self._loop
        if loop is not None:
            # The loop may have ended since.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._came.set)

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Catches signals within this context, in a running loop. A signal that is ignored (nohup) remains so.

        Signals reach only the main thread; a loop in another thread is stopped by `ask`.
        """
        self._loop = asyncio.get_running_loop()
        if self._number is not None:  # asked before there was a loop
            self._came.set()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

        def receive(number: int, _: object) -> None:
            for descriptor in terminals:
                if not os.isatty(descriptor):  # it hung up, and any output to it would be an error
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            self.ask(number)

        before = {number: signal.getsignal(number) for number in NAMES}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, receive)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def check(self) -> None:
        """Raises:
        Stopped: a signal came.
        """
        if self._number is not None:
            raise Stopped(self._number)

    async def interrupts(self, work: Awaitable[T]) -> T:
        """Returns what the work returns. The work must be safe to cancel at any moment.

        Raises:
          Stopped: a signal came first; the work is cancelled.
        """
        task, came = asyncio.ensure_future(work), asyncio.create_task(self._came.wait())
        try:
            await asyncio.wait([task, came], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await self.check()
            return await task
        finally:
            task.cancel()
            came.cancel()


RESUME = "the same command goes on from what is saved."


def exit_code(
    work: Callable[[], int | None], *errors: type[Exception], failed: int = 2, after_ctrl_c: str = RESUME
) -> int:
    """Runs the work of a command, and reports an error or Ctrl-C on stderr in one sentence.

    Args:
      work: Returns the exit code of the command, or None for 0.
      errors: Exceptions with messages for users, in addition to ValueError, OSError and ImportError. All others
        propagate.
      failed: Exit code after such an error.
      after_ctrl_c: State of the output after Ctrl-C, and how to continue.

    Returns:
      The exit code of the command: 130 after Ctrl-C.
    """
    try:
        with heard_ctrl_c():
            return work() or 0
    except KeyboardInterrupt:
        print(f"Ctrl-C: {after_ctrl_c}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, *errors) as error:
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        return failed


AGAIN_AFTER = 0.01  # seconds


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
    collecting = False

    def watch(phase: str, _: dict[str, int]) -> None:
        nonlocal collecting
        collecting = phase == "start"

    def receive(_: int, frame: FrameType | None) -> None:
        if collecting or _is_called_in_passing(frame):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_AFTER)
        else:
            raise KeyboardInterrupt

    gc.callbacks.append(watch)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        put_off, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        gc.callbacks.remove(watch)
        if put_off:
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
