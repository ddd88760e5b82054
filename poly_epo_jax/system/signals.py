"""Exit codes of commands, reliable handling of Ctrl-C, and graceful shutdown on SIGTERM, SIGHUP or Ctrl-C."""

import asyncio
import contextlib
import gc
import io
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import Any, TypeVar

from poly_epo_jax.system.text import printable

T = TypeVar("T")

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP", signal.SIGINT: "Ctrl-C"}


class Stopped(Exception):
    """Raised when this process, or another process of the run, received a shutdown request.

    Args:
      number: Number of the signal.
      reason: Sentences that describe why the run itself has requested the shutdown. Empty after a signal.
    """

    def __init__(self, number: int, reason: str = ""):
        super().__init__(number, reason)
        self.number, self.reason = number, reason

    def __str__(self) -> str:
        return NAMES.get(signal.Signals(self.number), str(self.number))


class StopSignal:
    """A shutdown request, by a signal or by `request`. The first request determines the reported signal.

    Shutdown is graceful: `run_interruptible` cancels pending waits immediately, and `check` raises Stopped after
    a running computation. Outside of `on_signals`, signals have their usual effect.
    """

    def __init__(self):
        self._request: tuple[int, str] | None = None
        self._requested = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def request(self, number: int, reason: str = "") -> None:
        """Requests a shutdown as if signal `number` had been received. May be called from any thread.

        Args:
          number: Number of the signal.
          reason: Reason of a request that rerunning the command would repeat, see `Stopped`.
        """
        if self._request is None:
            self._request = number, reason
        loop = self._loop
        if loop is not None:
            # The loop may have been closed already.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._requested.set)

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handles signals as shutdown requests within this context, which requires a running event loop.

        Signals that are ignored (nohup) remain ignored. Python delivers signals only to the main thread; an event loop
        in another thread is stopped with `request`.
        """
        self._loop = asyncio.get_running_loop()
        if self._request is not None:  # requested before the loop started
            self._requested.set()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

        def receive(number: int, _: object) -> None:
            for descriptor in terminals:
                if not os.isatty(descriptor):  # the terminal was closed, so writing to it would raise an error
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            self.request(number)

        before = {number: signal.getsignal(number) for number in NAMES}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, receive)
        # A signal that arrives just before the loop waits, or in another thread, would not wake it. The socket does.
        reader, writer = socket.socketpair()
        with reader, writer:
            writer.setblocking(False)
            self._loop.add_reader(reader, reader.recv, 1024)
            earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(earlier)
                self._loop.remove_reader(reader)
                for number, handler in before.items():
                    signal.signal(number, handler)

    async def check(self) -> None:
        """Raises Stopped if a shutdown was requested."""
        if self._request is not None:
            raise Stopped(*self._request)

    async def run_interruptible(self, work: Awaitable[T]) -> T:
        """Awaits `work` and returns its result. `work` must be safe to cancel at any time.

        Raises:
          Stopped: If a shutdown is requested before `work` is complete. `work` is cancelled.
        """
        task, requested = asyncio.ensure_future(work), asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait([task, requested], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await self.check()
            return await task
        finally:
            task.cancel()
            requested.cancel()


def run_in_loop(work: Coroutine[Any, Any, T], stop: StopSignal) -> T:
    """Runs a coroutine in a new event loop, in another thread if this thread already runs a loop, as in notebooks.

    Args:
      work: The coroutine. It handles `stop`.
      stop: Receives Ctrl-C if the coroutine runs in another thread.

    Returns:
      The result of the coroutine.

    Raises:
      KeyboardInterrupt: If Ctrl-C was received and the coroutine runs in another thread. The coroutine ends first.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    is_interrupted = False
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, work)
        while not running.done():
            try:
                wait([running])
            except KeyboardInterrupt:
                is_interrupted = True
                stop.request(signal.SIGINT)
    if is_interrupted and isinstance(running.exception(), SystemExit | None):
        raise KeyboardInterrupt
    return running.result()


RESUME = "Rerun the command to resume."


def exit_code(
    work: Callable[[], int | None], *errors: type[Exception], failed: int = 2, after_ctrl_c: str = RESUME
) -> int:
    """Runs a command, and prints errors and Ctrl-C to stderr as one line.

    If the reader of the output has closed its pipe, as `head` does, the command ends without a message. From this
    call on, characters that the encoding of stdout does not contain, such as those of a folder's name, are printed as
    escape sequences.

    Args:
      work: Returns the exit code of the command, or None for 0. May raise SystemExit, as argparse does.
      errors: Exceptions with messages for users, in addition to ValueError, OSError and ImportError. All others
        propagate.
      failed: Exit code after such an error.
      after_ctrl_c: State of the output after Ctrl-C, and how to continue.

    Returns:
      The exit code of the command, `failed` after an error, 130 after Ctrl-C, or 141 if the output has no reader.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with deliver_keyboard_interrupt():
            return _run_and_flush(work)
    except KeyboardInterrupt:
        print(f"Ctrl-C: {after_ctrl_c}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, *errors) as error:
        if isinstance(error, BrokenPipeError) and _discard_unread_output():
            return 128 + signal.SIGPIPE
        print(f"Error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return failed


def _run_and_flush(work: Callable[[], int | None]) -> int:
    """Runs a command, and writes its buffered output, for which Python would ignore errors after the command."""
    try:
        code = work() or 0
    except SystemExit:
        print(end="", flush=True)
        raise
    print(end="", flush=True)
    return code


def _discard_unread_output() -> bool:
    """Discards further output of stdout and stderr if the reader of one of them has closed its pipe.

    Returns:
      True if there is such a stream. Otherwise, a broken pipe belongs to another process, such as a worker.
    """
    unread = []
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # replaced streams, as in notebooks, may have no descriptor
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            unread += [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]
    for descriptor in unread:  # the interpreter writes the rest of its buffer at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return bool(unread)


CTRL_C_RETRY_SECONDS = 0.01  # delay in seconds before a deferred Ctrl-C is raised again


@contextlib.contextmanager
def deliver_keyboard_interrupt() -> Iterator[None]:
    """Defers Ctrl-C while Python runs code in which exceptions are printed and discarded.

    Python discards exceptions in callbacks of the garbage collector, such as JAX's, in callbacks of weak references and
    in destructors. Within this context, a Ctrl-C during such code raises KeyboardInterrupt shortly afterwards. The
    context has no effect if SIGINT has another handler or is ignored (nohup), or outside of the main thread.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    collecting = False

    def begin(phase: str, _: dict[str, int]) -> None:
        nonlocal collecting
        collecting = collecting or phase == "start"

    def end(phase: str, _: dict[str, int]) -> None:
        nonlocal collecting
        collecting = phase == "start"

    def receive(_: int, frame: FrameType | None) -> None:
        if collecting or _discards_exceptions(frame):
            signal.setitimer(signal.ITIMER_REAL, CTRL_C_RETRY_SECONDS)
        else:
            raise KeyboardInterrupt

    # All other callbacks must run between these two, so that Ctrl-C is deferred while they run.
    gc.callbacks.insert(0, begin)
    gc.callbacks.append(end)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        deferred, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        gc.callbacks.remove(begin)
        gc.callbacks.remove(end)
        if deferred:
            raise KeyboardInterrupt


def _discards_exceptions(frame: FrameType | None) -> bool:
    """Returns True if a frame or one of its callers is a destructor, or a callback of gc or a weak reference."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if code in callbacks or code.co_name == "__del__" or module in ("weakref", "_weakrefset"):
            return True
        frame = frame.f_back
    return False
