"""A Ctrl-C that comes into a callback of the garbage collector, as JAX has one, ends the command nevertheless."""

import gc
import signal
import threading
from collections.abc import Iterator

import pytest
from fakes import PATIENCE

from poly_epo_jax.ctrl_c import catch_ctrl_c


@pytest.fixture(autouse=True)
def caught(default_signals: None) -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    catch_ctrl_c()
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def collects() -> Iterator[list[str]]:
    """The phases of collections, the first of which is interrupted in what its callback calls."""
    phases: list[str] = []

    def interrupted(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)
        if len(phases) == 1:
            (lambda: signal.raise_signal(signal.SIGINT))()

    gc.callbacks.append(interrupted)
    yield phases
    gc.callbacks.remove(interrupted)


def test_it_raises_as_ever():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_it_is_raised_after_a_garbage_collection_that_it_came_into(collects: list[str]):
    never = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        gc.collect()
        assert collects[:2] == ["start", "stop"]
        never.wait(PATIENCE)


def test_what_ignores_it_goes_on_ignoring_it():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    catch_ctrl_c()
    signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
