"""Kills commands at random times and restarts them until they finish. Their output must have the same bytes.

The commands are the training run of training_runs.py, with fewer steps, and an export, an evaluation and a report of
this run. Each kill is an attempt, and so is each final restart and each comparison of files.
"""

import contextlib
import itertools
import os
import random
import re
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
TIMEOUT = 300.0  # maximum seconds from a signal to the exit, on a busy machine
MAX_KILLS = 4


class Soak:
    """Runs commands in forked processes, and kills them.

    Attributes:
      random: Selects signals and times.
      folder: Folder for caches, logs and outputs.
      server: Starts the commands.
    """

    def __init__(self, random: random.Random, folder: Path):
        self.random, self.folder, self.server = random, folder, ForkServer()

    def config(self, workdir: Path) -> list[str]:
        """Returns the configuration flags of a run."""
        caches = {"base.cache_dir": self.folder / "base", "compilation_cache_dir": self.folder / "compiled"}
        values = SETTINGS | CHANGES | caches | {"workdir": workdir}
        return ["--config=configs/polynomial.py", *(f"--config.{key}={value}" for key, value in values.items())]

    def run(self, module: str, arguments: Sequence[str]) -> float:
        """Runs a command without interruption, and returns its duration in seconds."""
        log, start = self.folder / "reference.log", time.monotonic()
        self.server.start(module, arguments, log)
        assert self.server.wait() == 0, log.read_text()
        return time.monotonic() - start

    def killed(self, module: str, arguments: Sequence[str], seconds: float, log: Path) -> Iterator[Outcome]:
        """Kills a command one to MAX_KILLS times, and then runs it to its end.

        Args:
          module: Module of the command.
          arguments: Arguments of the command.
          seconds: Duration of the command without interruption. Kills happen within this time after the command has
            installed its signal handlers.
          log: File for the output of the command.

        Yields:
          An outcome per kill, and one for the final run.
        """
        name = module.rpartition(".")[2]
        for _ in range(self.random.randint(1, MAX_KILLS)):
            number, delay = self.random.choice(SIGNALS), self.random.uniform(0, seconds)
            before = len(log.read_text()) if log.exists() else 0
            pid = self.server.start(module, arguments, log)
            _wait_for_handlers(pid)
            time.sleep(delay)
            start = time.monotonic()
            done = not _send(pid, number)
            code = self.server.wait()
            took = time.monotonic() - start
            output = log.read_text()[before:]
            # Before training installs its handlers, a command is terminated by the signal: there is nothing to save.
            codes = {0} if done else {0, -number, 128 + number}
            held = (code in codes or _exported(module, code, output)) and "Traceback" not in output and took < TIMEOUT
            what = f"{name}, {number.name} after {delay:.2f} s: code {code} after {took:.1f} s\n{output}"
            yield Outcome(f"{number.name} to {name}", held, what)
            if code == 0 or _exported(module, code, output):
                return
        before = len(log.read_text())
        self.server.start(module, arguments, log)
        code = self.server.wait()
        output = log.read_text()[before:]
        yield Outcome(f"{name} restarted", code == 0 or _exported(module, code, output), f"code {code}\n{output}")

    def same(self, name: str, found: Path, expected: Path, files: Sequence[str]) -> Outcome:
        """Compares the bytes of files in two folders."""
        different = [file for file in files if _bytes(found / file) != _bytes(expected / file)]
        return Outcome(f"bytes of {name}", not different, f"{found}: different bytes in {', '.join(different)}")


def attack(random: random.Random, folder: Path) -> Iterator[Outcome]:
    """Kills the commands in turn."""
    soak = Soak(random, folder)
    try:
        yield from _attack(soak)
    finally:
        soak.server.close()


def _attack(soak: Soak) -> Iterator[Outcome]:
    reference, model, evaluation = (soak.folder / name for name in ("reference", "model", "evaluation"))
    commands: dict[str, tuple[Callable[[Path], list[str]], Path, Sequence[str]]] = {
        MAIN: (soak.config, reference, ("metrics.jsonl", "generations.jsonl")),
        EXPORT: (lambda out: [str(reference), str(out)], model, ("model.safetensors", "tokenizer.json", "config.json")),
        EVALUATE: (
            lambda out: [
                *soak.config(reference),
                *("--benchmarks=polynomial", f"--models=it={reference}", "--num_generations=8", f"--output={out}"),
            ],
            evaluation,
            ("polynomial/it/generations.jsonl", "polynomial/it/results.json"),
        ),
        REPORT: (lambda out: [str(reference), f"--output={out}"], soak.folder / "report", ()),
    }
    seconds: dict[str, float] = {}
    for turn in itertools.cycle((MAIN, EXPORT, MAIN, EVALUATE, MAIN, REPORT)):
        arguments, expected, files = commands[turn]
        if turn not in seconds:
            for _ in range(2):  # the second run reuses programs that the first run compiled
                first = turn not in seconds
                seconds[turn] = soak.run(turn, arguments(expected if first else soak.folder / f"second-{turn}"))
        with tempfile.TemporaryDirectory(dir=soak.folder) as scratch:
            out = Path(scratch) / "out"
            yield from soak.killed(turn, arguments(out), seconds[turn], Path(scratch) / "log")
            yield soak.same(turn.rpartition(".")[2], out, expected, files)


def _exported(module: str, code: int, output: str) -> bool:
    """Returns True if the command is an export that was killed after it had been written completely."""
    return module == EXPORT and code == 2 and "already exists" in output


def _wait_for_handlers(pid: int) -> None:
    """Waits until a command handles Ctrl-C, or has ended. Before, Python prints a traceback."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while True:
            status = Path(f"/proc/{pid}/status").read_text()
            (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
            # `deliver_keyboard_interrupt` also handles SIGALRM.
            if int(caught, 16) >> (signal.SIGALRM - 1) & 1 or re.search(r"^State:\s*Z", status, re.MULTILINE):
                return
            time.sleep(0.001)


def _send(pid: int, number: signal.Signals) -> bool:
    """Sends a signal, and returns True if the process was still running."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
