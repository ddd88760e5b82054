"""Kills real commands at random moments, and restarts them until they are done: they must leave the same bytes.

A run is that of training_runs.py, but shorter; an export, an evaluation and a report of it follow. Each kill is
an attempt, and so is each command that was killed and then finished.
"""

import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fork_server import ForkServer
from outcome import Outcome
from training_runs import SETTINGS

CHANGES = {"train.num_steps": 10, "checkpoint.every": 3, "eval.every": 4, "log.generations_every": 2}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAIN, EXPORT, EVALUATE, REPORT = (f"poly_epo_jax.{name}" for name in ("main", "export", "evaluate", "report"))
HONOURED_IN = 30.0  # seconds, on a busy machine
MOST_KILLS = 4


class Soak:
    def __init__(self, random: random.Random, folder: Path):
        self.random, self.folder, self.server = random, folder, ForkServer()

    def config(self, workdir: Path) -> list[str]:
        caches = {"base.cache_dir": self.folder / "base", "compilation_cache": self.folder / "compiled"}
        values = SETTINGS | CHANGES | caches | {"workdir": workdir}
        return ["--config=configs/polynomial.py", *(f"--config.{key}={value}" for key, value in values.items())]

    def whole(self, module: str, arguments: Sequence[str]) -> float:
        """The seconds that a command takes that is left alone."""
        log, start = self.folder / "whole.log", time.monotonic()
        self.server.start(module, arguments, log)
        assert self.server.wait() == 0, log.read_text()
        return time.monotonic() - start

    def killed(self, module: str, arguments: Sequence[str], seconds: float, log: Path) -> Iterator[Outcome]:
        """Kills the command some times within the seconds that it takes, and then lets it end."""
        name = module.rpartition(".")[2]
        for _ in range(self.random.randint(1, MOST_KILLS)):
            number, delay = self.random.choice(SIGNALS), self.random.uniform(0, seconds)
            before = len(log.read_text()) if log.exists() else 0
            pid = self.server.start(module, arguments, log)
            time.sleep(delay)
            start = time.monotonic()
            done = not _send(pid, number)
            code = self.server.wait()
            took = time.monotonic() - start
            said = log.read_text()[before:]
            # Before it can save anything, a signal ends a process like any other.
            codes = {0} if done else {0, -number, 128 + number}
            held = (code in codes or _exported(module, code, said)) and "Traceback" not in said and took < HONOURED_IN
            what = f"{name}, {number.name} after {delay:.2f} s: code {code} after {took:.1f} s\n{said}"
            yield Outcome(f"{number.name} to {name}", held, what)
            if code == 0 or _exported(module, code, said):
                return
        before = len(log.read_text())
        self.server.start(module, arguments, log)
        code = self.server.wait()
        said = log.read_text()[before:]
        yield Outcome(f"{name} started again", code == 0 or _exported(module, code, said), f"code {code}\n{said}")

    def same(self, name: str, found: Path, expected: Path, files: Sequence[str]) -> Outcome:
        wrong = [file for file in files if _bytes(found / file) != _bytes(expected / file)]
        return Outcome(f"bytes of {name}", not wrong, f"{found}: other bytes in {', '.join(wrong)}")


def attack(random: random.Random, folder: Path) -> Iterator[Outcome]:
    soak = Soak(random, folder)
    try:
        yield from _attack(soak)
    finally:
        soak.server.close()


def _attack(soak: Soak) -> Iterator[Outcome]:
    whole, model, evaluation = (soak.folder / name for name in ("whole", "model", "evaluation"))
    commands: dict[str, tuple[Callable[[Path], list[str]], Path, Sequence[str]]] = {
        MAIN: (soak.config, whole, ("metrics.jsonl", "generations.jsonl")),
        EXPORT: (lambda out: [str(whole), str(out)], model, ("model.safetensors", "tokenizer.json", "config.json")),
        EVALUATE: (
            lambda out: [
                *soak.config(whole),
                *("--benchmarks=polynomial", f"--models=it={whole}", "--num_generations=8", f"--output={out}"),
            ],
            evaluation,
            ("polynomial/it/generations.jsonl", "polynomial/it/results.json"),
        ),
        REPORT: (lambda out: [str(whole), f"--output={out}"], soak.folder / "report", ()),
    }
    seconds: dict[str, float] = {}
    for turn in itertools.cycle((MAIN, EXPORT, MAIN, EVALUATE, MAIN, REPORT)):
        arguments, expected, files = commands[turn]
        if turn not in seconds:
            for _ in range(2):  # the second reuses what the first has compiled
                first = turn not in seconds
                seconds[turn] = soak.whole(turn, arguments(expected if first else soak.folder / f"second-{turn}"))
        with tempfile.TemporaryDirectory(dir=soak.folder) as scratch:
            out = Path(scratch) / "out"
            yield from soak.killed(turn, arguments(out), seconds[turn], Path(scratch) / "log")
            yield soak.same(turn.rpartition(".")[2], out, expected, files)


def _exported(module: str, code: int, said: str) -> bool:
    """Whether it is an export that was killed once it was written; it is there, and is compared as such."""
    return module == EXPORT and code == 2 and "exists already" in said


def _send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
