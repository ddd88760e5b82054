"""A signal cancels a wait, even for a thread that hangs, and signal handlers are restored afterwards."""

import asyncio
import os
import pty
import selectors
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fakes import PATIENCE

from poly_epo_jax.parallel import hosts
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.system.signals import Stopped, StopSignal

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_cancels_a_wait_that_hangs(number: signal.Signals):
    before, never, cancelled = signal.getsignal(number), threading.Event(), []

    async def hangs() -> None:
        os.kill(os.getpid(), number)
        try:
            await in_daemon_thread(never.wait)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> None:
        stop = StopSignal()
        with stop.on_signals():
            assert await stop.run_interruptible(asyncio.sleep(0, "done")) == "done"
            await stop.check()
            with pytest.raises(Stopped) as stopped:
                await hosts.barrier(stop.run_interruptible(hangs()))
            assert stopped.value.number == number and cancelled == [True]
            with pytest.raises(Stopped):
                await stop.check()

    asyncio.run(main())
    assert signal.getsignal(number) == before
    never.set()


@pytest.mark.usefixtures("default_signals")
def test_a_signal_that_another_thread_receives_wakes_the_event_loop():
    loop_waits, ended = threading.Event(), []

    class Selector(selectors.DefaultSelector):
        """Sets `loop_waits` just before the event loop waits, unless the wait ends immediately."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is None or timeout > 1:
                loop_waits.set()
            return super().select(timeout)

    def receive() -> None:
        assert loop_waits.wait(PATIENCE)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    async def wait() -> None:
        await asyncio.sleep(PATIENCE)
        ended.append(True)

    async def main() -> None:
        stop = StopSignal()
        with stop.on_signals():
            threading.Thread(target=receive).start()
            with pytest.raises(Stopped):
                await stop.run_interruptible(wait())

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Selector())) as runner:
        runner.run(main())
    assert not ended


def test_an_exception_of_the_work_is_raised():
    async def fails() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        asyncio.run(StopSignal().run_interruptible(fails()))


def test_an_ignored_signal_remains_ignored(monkeypatch: pytest.MonkeyPatch):
    """`nohup` makes processes ignore SIGHUP."""

    async def main() -> None:
        stop = StopSignal()
        with stop.on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            await stop.run_interruptible(asyncio.sleep(0))
            await stop.check()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGHUP, before)


ON_A_TERMINAL = """
import asyncio, sys
from pathlib import Path
from poly_epo_jax.system.signals import StopSignal, Stopped

async def main():
    stop = StopSignal()
    with stop.on_signals():
        try:
            print("ready", flush=True)
            await stop.run_interruptible(asyncio.sleep(1000))
        except Stopped as stopped:
            print("not shown", flush=True)
            print("not shown", file=sys.stderr, flush=True)
            Path(sys.argv[1]).write_text(str(stopped))

asyncio.run(main())
"""


@pytest.mark.usefixtures("default_signals")
def test_output_to_a_closed_terminal_is_not_an_error(tmp_path: Path):
    controller, terminal = pty.openpty()
    command = ["setsid", "--ctty", "--wait", sys.executable, "-c", ON_A_TERMINAL, str(tmp_path / "stopped")]
    process = subprocess.Popen(command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    assert b"ready" in os.read(controller, 100)
    os.close(controller)
    assert process.wait(PATIENCE) == 0
    assert (tmp_path / "stopped").read_text() == "SIGHUP"


HUNG = """
import asyncio, threading
from poly_epo_jax.system.daemon_thread import in_daemon_thread

async def main():
    await asyncio.wait([asyncio.ensure_future(in_daemon_thread(threading.Event().wait))], timeout=0.1)

asyncio.run(main())
"""


def test_a_process_can_exit_while_a_daemon_thread_hangs():
    assert subprocess.run([sys.executable, "-c", HUNG], cwd=ROOT, timeout=PATIENCE).returncode == 0
