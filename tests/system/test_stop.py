"""A signal ends a wait, even one that hangs, and restores what was there before."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from poly_epo_jax.parallel import hosts
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.system.signals import Stop, Stopped

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_what_hangs(number: signal.Signals):
    before, never, cancelled = signal.getsignal(number), threading.Event(), []

    async def hangs() -> None:
        os.kill(os.getpid(), number)
        try:
            await in_daemon_thread(never.wait)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> None:
        stop = Stop()
        with stop.on_signals():
            assert await stop.interrupts(asyncio.sleep(0, "done")) == "done"
            await stop.check()
            with pytest.raises(Stopped) as stopped:
                await hosts.barrier(stop.interrupts(hangs()))
            assert stopped.value.number == number and cancelled == [True]
            with pytest.raises(Stopped):
                await stop.check()

    asyncio.run(main())
    assert signal.getsignal(number) == before
    never.set()


def test_a_failure_is_not_taken_for_a_signal():
    async def fails() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        asyncio.run(Stop().interrupts(fails()))


def test_what_is_ignored_remains_so(monkeypatch: pytest.MonkeyPatch):
    """As nohup has it."""

    async def main() -> None:
        stop = Stop()
        with stop.on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            await stop.interrupts(asyncio.sleep(0))
            await stop.check()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGHUP, before)


ON_A_TERMINAL = """
import asyncio, sys
from pathlib import Path
from poly_epo_jax.system.signals import Stop, Stopped

async def main():
    stop = Stop()
    with stop.on_signals():
        try:
            print("ready", flush=True)
            await stop.interrupts(asyncio.sleep(1000))
        except Stopped as stopped:
            print("shown to no one", flush=True)
            print("nor this", file=sys.stderr, flush=True)
            Path(sys.argv[1]).write_text(str(stopped))

asyncio.run(main())
"""


@pytest.mark.usefixtures("default_signals")
def test_what_is_shown_on_a_lost_terminal_is_no_error(tmp_path: Path):
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", "--wait", sys.executable, "-c", ON_A_TERMINAL, str(tmp_path / "said")]
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert b"ready" in os.read(ours, 100)
    os.close(ours)
    assert process.wait(60) == 0
    assert (tmp_path / "said").read_text() == "SIGHUP"


HUNG = """
import asyncio, threading
from poly_epo_jax.system.daemon_thread import in_daemon_thread

async def main():
    await asyncio.wait([asyncio.ensure_future(in_daemon_thread(threading.Event().wait))], timeout=0.1)

asyncio.run(main())
"""


def test_a_process_ends_though_a_thread_hangs():
    assert subprocess.run([sys.executable, "-c", HUNG], cwd=ROOT, timeout=60).returncode == 0
