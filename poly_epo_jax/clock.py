"""Seconds per stage of a training step."""

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
