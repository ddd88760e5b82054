"""Trains on an environment with faults: python benchmarks/faulty_environment.py OUTPUT

Of the episodes of guess_number, 5% raise an exception, 2% never return and 2% answer with 200,000 characters, by their
seed, and one ends its worker process. Three runs of 20 steps with these faults alternate with three without. The script
verifies that each run ends, and that exactly the faulty episodes are masked: the task logs its faults, with which the
rows of generations.jsonl are compared. It prints the seconds of each run, and the largest expected median with faults:
1.3 times the median without faults, and the time limit for each step and attempt. The first run also fits the base
policy of all runs. Runs that are complete are not repeated.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from ml_collections import ConfigDict

import poly_epo_jax
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.tasks.guess_number import GuessNumberEpisode, GuessNumberTask
from poly_epo_jax.types import Generation, Problem

STEPS, REPEATS, ATTEMPTS, SECONDS = 20, 3, 3, 1.0
KINDS = {"raise": "raised", "hang": "late", "long": "long"}
"""Kind of the failure in generations.jsonl, by fault."""


def fault_of(seed: int) -> str:
    """Returns the fault of an episode: "raise", "hang", "long", or "" for none."""
    drawn = random.Random(seed).random()
    return next((name for name, limit in (("raise", 0.05), ("hang", 0.07), ("long", 0.09)) if drawn < limit), "")


class FaultyEpisode(GuessNumberEpisode):
    """An episode with a fault.

    Attributes:
      fault: The fault, see `fault_of`.
    """

    fault = ""

    async def reply(self, generation: Generation) -> str | None:
        """Answers the first guess with the fault, and others as `GuessNumberEpisode` does."""
        if self.fault == "raise":
            raise RuntimeError("this episode raises an exception")
        if self.fault == "hang":
            time.sleep(3600)
        return "<" * 200_000 if self.fault == "long" else await super().reply(generation)


class FaultyTask(GuessNumberTask):
    """The task guess_number with faults, which it logs in the folder FAULTS. Without this variable, it has no faults.

    The folder is not an option, because runs with other options do not share a base policy.
    """

    max_reply_tokens = 8

    def __init__(self):
        super().__init__(num_held_out=8)
        self.folder = os.environ.get("FAULTS", "")

    def start(self, problem: Problem, seed: int) -> GuessNumberEpisode:
        """Starts an episode. The first one ends its worker process."""
        episode = FaultyEpisode(int(problem.answer), self.guesses)
        if not self.folder:
            return episode
        try:
            os.close(os.open(Path(self.folder) / "killed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            episode.fault = fault_of(seed)
        else:
            os.abort()
        if episode.fault:
            with open(Path(self.folder) / "faults.jsonl", "a") as log:
                log.write(json.dumps([problem.id, seed, episode.fault]) + "\n")
        return episode


TASKS["faulty"] = FaultyTask


def get_config() -> ConfigDict:
    """Returns the configuration of the runs."""
    config = poly_epo_jax.get_config("guess_number:grpo")
    config.task.name = "faulty"
    config.base.clean_steps = 200
    config.train.num_steps = STEPS
    config.train.prompts_per_batch = config.train.prompts_per_minibatch = 8
    config.eval.every = 0
    config.log.generations_every = 1
    config.rollouts.environment_workers = 4
    config.rollouts.episode_timeout_seconds = SECONDS
    return config


def train(folder: Path, faults: str) -> float:
    """Trains unless the run is complete, and returns its seconds."""
    if not (folder / "seconds").exists():
        folder.mkdir(parents=True, exist_ok=True)
        flags = [f"--config.workdir={folder / 'run'}", f"--config.base.cache_dir={folder.parent / 'base'}"]
        begin = time.monotonic()
        command = [sys.executable, "-m", "poly_epo_jax.main", f"--config={__file__}", *flags]
        subprocess.run(command, env=os.environ | {"FAULTS": faults}, check=True)
        (folder / "seconds").write_text(f"{time.monotonic() - begin}")
    return float((folder / "seconds").read_text())


def check(folder: Path) -> int:
    """Verifies that exactly the faulty episodes are masked, and returns their number.

    Raises:
      SystemExit: If they are not.
    """
    from poly_epo_jax.records.run_folder import GENERATIONS, METRICS, read_rows  # not required by the workers

    logged = {tuple(row) for row in map(json.loads, (folder / "faults.jsonl").read_text().splitlines())}
    expected = Counter((problem, KINDS[fault]) for problem, _, fault in logged)
    rows = read_rows(folder / "run" / GENERATIONS)
    masked = Counter((row["problem"], row["failure"]) for row in rows if row.get("failure"))
    trained = sum(row["advantage"] is not None for row in rows if row.get("failure"))
    counted = sum(row["environment/failed_responses"] for row in read_rows(folder / "run" / METRICS))
    if expected != masked or trained or counted != masked.total() or not (folder / "killed").exists():
        raise SystemExit(
            f"{folder}: missing {expected - masked}, unexpected {masked - expected}, {trained} trained, "
            f"{counted:g} counted."
        )
    return masked.total()


def main(output: Path) -> None:
    """Trains all runs, and prints a table."""
    seconds: dict[str, list[float]] = {"without faults": [], "with faults": []}
    print("| run | faults | seconds |\n|---|---|---|")
    for repeat in range(REPEATS):
        for name, times in seconds.items():
            folder = (output / f"{name}-{repeat}".replace(" ", "-")).absolute()
            times.append(train(folder, str(folder) if name == "with faults" else ""))
            count = check(folder) if name == "with faults" else 0
            print(f"| {name} | {count} | {times[-1]:.1f} |", flush=True)
    without, with_faults = map(statistics.median, seconds.values())
    most = 1.3 * without + STEPS * ATTEMPTS * SECONDS
    print(f"median with faults: {with_faults:.1f} s, at most {most:.1f} s expected")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
