"""Seconds per stage of a training step, and of work that overlaps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from poly_epo_jax.types import Metrics


class StageClock:
    """Started when made; each `with clock.stage(name)` adds to that stage."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: Metrics = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Seconds since the clock was made, whichever stage took them."""
        return time.perf_counter() - self._start

    def seconds(self) -> Metrics:
        return {f"seconds/{name}": seconds for name, seconds in self._seconds.items()} | {"seconds/step": self.total()}


class BusyTime:
    """How long at least one of several overlapping pieces of work was under way."""

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0
        self._past = 0.0

    @contextmanager
    def work(self) -> Iterator[None]:
        if not self._running:
            self._since = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._past += time.perf_counter() - self._since

    def seconds(self) -> float:
        """So far, what is under way now included."""
        return self._past + (time.perf_counter() - self._since if self._running else 0.0)
