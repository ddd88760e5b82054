"""A Ctrl-C that arrives while Python discards exceptions still terminates the command, without a message there."""

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
from fakes import PATIENCE

from poly_epo_jax.system.signals import deliver_keyboard_interrupt


@pytest.fixture(autouse=True)
def caught(default_signals: None) -> Iterator[None]:
    def handlers() -> list[object]:
        return [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM), *gc.callbacks]

    before = handlers()
    with deliver_keyboard_interrupt():
        yield
    assert handlers() == before


class Holder:
    """An object that may reference itself, so that only the garbage collector deletes it."""

    def __init__(self, in_cycle: bool):
        self.held = self if in_cycle else None


def in_a_callback_of_collections(ctrl_c: Callable[[], None]) -> None:
    def interrupted(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(interrupted)
        ctrl_c()

    gc.callbacks.append(interrupted)
    gc.collect()


def in_a_collection(ctrl_c: Callable[[], None]) -> None:
    holder = Holder(in_cycle=True)
    weak = weakref.ref(holder, lambda _: ctrl_c())
    del holder
    gc.collect()
    assert weak() is None


def in_a_destructor(ctrl_c: Callable[[], None]) -> None:
    class Interrupted(Holder):
        def __del__(self):
            ctrl_c()

    Interrupted(in_cycle=False)


def in_a_weak_dictionary(ctrl_c: Callable[[], None]) -> None:
    class Interrupted:
        def __hash__(self) -> int:
            ctrl_c()
            return 0

    key = Interrupted()
    weakref.WeakKeyDictionary()[key] = None


def test_ctrl_c_raises_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "place", [in_a_callback_of_collections, in_a_collection, in_a_destructor, in_a_weak_dictionary]
)
def test_ctrl_c_is_raised_after_code_that_discards_exceptions(place: Callable[[Callable[[], None]], None]):
    came: list[bool] = []

    def ctrl_c() -> None:
        if not came:
            came.append(True)
            signal.raise_signal(signal.SIGINT)
            came.append(True)  # reached, because no exception was raised here

    with pytest.raises(KeyboardInterrupt):
        place(ctrl_c)
        threading.Event().wait(PATIENCE)
    assert came == [True, True]


def test_an_ignored_ctrl_c_remains_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deliver_keyboard_interrupt():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_deferred_ctrl_c_is_raised_at_the_end_of_the_context(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("poly_epo_jax.system.signals.CTRL_C_RETRY_SECONDS", PATIENCE)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), deliver_keyboard_interrupt():
        in_a_collection(lambda: signal.raise_signal(signal.SIGINT))
