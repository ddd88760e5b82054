"""Counters that are kept apart for training and for evaluations during training, which can run at the same time."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar

_evaluates: ContextVar[bool] = ContextVar("_evaluates", default=False)


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    """Counts the events in this context, and in tasks and threads that it starts, as those of an evaluation."""
    before = _evaluates.set(True)
    try:
        yield
    finally:
        _evaluates.reset(before)


class Counters:
    """Counters by name, of training and of evaluations."""

    def __init__(self) -> None:
        self._counts = {is_evaluation: Counter[str]() for is_evaluation in (False, True)}

    @property
    def current(self) -> Counter[str]:
        """The counters of training or, in the context of an evaluation, those of evaluations."""
        return self._counts[_evaluates.get()]

    def take(self) -> Counter[str]:
        """Returns the current counters since the last call."""
        counts, self._counts[_evaluates.get()] = self.current, Counter[str]()
        return counts
