"""A task for worker processes whose episodes fail in the way that their problem names. It does not import JAX."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from poly_epo_jax.types import EpisodeFailure, Generation, Outcome, Problem

NAMES = ("works", "raises", "fails", "exits", "grows", "hangs")


class WorkerTask:
    """Replies with the number of the turn and the length of all previous turns, twice."""

    train_problems: Sequence[Problem] = [
        Problem(name, f"{letter}:", "") for name, letter in zip(NAMES, "abcdxy", strict=True)
    ]
    held_out_problems = train_problems

    def start(self, problem: Problem, seed: int) -> Any:
        return WorkerEpisode(problem.id, seed)


class WorkerEpisode:
    def __init__(self, name: str, seed: int):
        self.name, self.seed, self.turns, self.is_worker = name, seed, list[str](), True

    async def reply(self, generation: Generation) -> str | None:
        self.turns.append(generation.turns[-1])
        assert generation.turns[::2] == tuple(self.turns)
        assert not self.is_worker or "jax" not in sys.modules
        if len(self.turns) == 2:
            FAULTS.get(self.name, len)(self.turns)
        return None if len(self.turns) == 3 else f"{len(self.turns)}:{sum(map(len, self.turns))}"

    async def close(self) -> Outcome:
        return Outcome(1.0, ("turns", tuple(self.turns)), metrics={"seed": float(self.seed % 97)})


def _raise(turns: list[str]) -> None:
    raise ValueError(f"in turn {len(turns)}")


def _fail(turns: list[str]) -> None:
    raise EpisodeFailure("out of order")


def _exit(turns: list[str]) -> None:
    os._exit(7)


def _grow(turns: list[str]) -> None:
    turns.append("x" * 2**34)


def _hang(turns: list[str]) -> None:
    while True:
        time.sleep(60)


FAULTS = {"raises": _raise, "fails": _fail, "exits": _exit, "grows": _grow, "hangs": _hang}
