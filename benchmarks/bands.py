"""Trains a recipe with several seeds and writes the bands of `poly-epo check-run`, or checks other runs with them.

    python benchmarks/bands.py polynomial --steps=20,40 --seeds=0:8
    python benchmarks/bands.py polynomial --seeds=100:104 --check
    python benchmarks/bands.py polynomial --seeds=0:2 --check --method=grpo
    python benchmarks/bands.py polynomial --seeds=0:2 --check --reward=shuffled

Runs are in runs/bands/, and are stopped after the last of the steps, because the learning rate depends on
train.num_steps. Runs that have reached this step are not repeated. The first command writes
poly_epo_jax/check_run/bands/RECIPE-METHOD.json, and checks each seed with the bands of the other seeds. The other
commands print the results of runs that the bands do not contain.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import poly_epo_jax
from poly_epo_jax.check_run.bands import METRICS, Bands, summary, values_at
from poly_epo_jax.records import run_folder

BANDS = Path(poly_epo_jax.__file__).parent / "check_run" / "bands"

BROKEN = {
    "constant": "lambda correct, state: 1.0",
    "shuffled": "lambda correct, state: (state.append(correct), state.pop(0))[1]",
}
"""Broken rewards: the same reward for all responses, and the reward of the response that was graded before."""

TRAIN_BROKEN = """
import sys
from poly_epo_jax import main
from poly_epo_jax.tasks import TASKS
task, broken, state = TASKS[sys.argv.pop()], eval(sys.argv.pop()), [0.0]
correct_reward = task.reward
task.reward = lambda self, problem, generation: broken(correct_reward(self, problem, generation), state)
main.main()
"""


def train(folder: Path, config: str, seed: int, last_step: int, reward: str) -> None:
    """Trains until the evaluation at `last_step` is written, and stops the run."""
    if run_folder.is_evaluated(folder, last_step):
        return
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"--config={config}", f"--config.seed={seed}", f"--config.workdir={folder}"]
    command = [sys.executable, "-m", "poly_epo_jax.main", *flags]
    if reward:
        task = config.partition(":")[0]  # the recipes have the names of their tasks
        command = [sys.executable, "-c", TRAIN_BROKEN, *flags, BROKEN[reward], task]
    started, log_file = time.monotonic(), folder.with_suffix(".log")
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and not run_folder.is_evaluated(folder, last_step):
            time.sleep(1)
        process.send_signal(signal.SIGTERM)
        process.wait()
    if not run_folder.is_evaluated(folder, last_step):
        sys.exit(f"The run {folder} failed; see {log_file}.")
    used = os.times()
    cpu_seconds = used.children_user + used.children_system
    print(f"{folder}: {time.monotonic() - started:.0f} s; {cpu_seconds:.0f} CPU s of all runs", flush=True)


def measure(folders: Sequence[Path], steps: Sequence[int]) -> Bands:
    """Reads the bands of runs."""
    values: dict[str, dict[str, list[float]]] = {metric: {str(step): [] for step in steps} for metric in METRICS}
    for folder in folders:
        for (metric, step), value in values_at(run_folder.read_rows(folder / run_folder.METRICS), steps).items():
            if value is None:
                raise ValueError(f"{folder} has no {metric} at step {step}.")
            values[metric][str(step)].append(value)
    config, about = run_folder.read_config(folders[0]), run_folder.read_about(folders[0])
    return Bands(config, about["versions"][0], [int(folder.name) for folder in folders], values)


def print_check(folder: Path, bands: Bands) -> None:
    """Prints the result of a run, and its values outside the bands."""
    compared = bands.compare(run_folder.read_rows(folder / run_folder.METRICS))
    print(f"{folder}: {summary(bands, compared)}")
    for one in compared:
        if not one.is_inside:
            print("   ", *one.cells())


def main() -> None:
    """Trains the runs and writes or checks the bands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--steps", help="steps of evaluations, separated by commas; --check uses those of the bands")
    parser.add_argument("--seeds", default="0:8", help="FIRST:END")
    parser.add_argument("--method", default="poly_epo")
    parser.add_argument("--reward", default="", choices=BROKEN)
    parser.add_argument("--check", action="store_true", help="check the runs instead of writing the bands")
    options = parser.parse_args()
    if not options.check and (options.reward or not options.steps):
        parser.error("--steps is required without --check, and --reward only works with --check")
    file = BANDS / f"{options.recipe}-{'poly_epo' if options.check else options.method}.json"
    written = Bands(**json.loads(file.read_text())) if options.check else None
    steps = [int(step) for step in (written.values["eval/reward"] if written else options.steps.split(","))]
    kind = "-".join(filter(None, [options.recipe, options.method, options.reward]))
    folders = [Path("runs/bands") / kind / str(seed) for seed in range(*map(int, options.seeds.split(":")))]
    for folder in folders:
        train(folder, f"{options.recipe}:{options.method}", int(folder.name), steps[-1], options.reward)
        if written:
            print_check(folder, written)
    if not written:
        file.write_text(json.dumps(dataclasses.asdict(measure(folders, steps)), indent=1) + "\n")
        for folder in folders:
            print_check(folder, measure([other for other in folders if other != folder], steps))


if __name__ == "__main__":
    main()
