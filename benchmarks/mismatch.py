"""Compares the log-probabilities of servers and trainer over 200 steps: python benchmarks/mismatch.py [OUTPUT [STEPS]]

launch/node.sh trains a small policy in float32 with real servers on CPU, first SGLang and then vLLM. The learning rate
is 0, so each step pushes the weights of the previous step, and the mismatch stays constant unless updates accumulate
errors. Writes mismatch.png to OUTPUT (default: runs/mismatch), and prints the mean mismatch of the first and the last
quarter of the steps. Runs that are complete are not repeated.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from poly_epo_jax.records.run_folder import METRICS, read_rows
from poly_epo_jax.report.figures import report_style

CONFIG = "--config=configs/polynomial.py:grpo"
SETTINGS = {
    "base.head_dim": 32,  # vLLM does not support 16 on CPU.
    "base.clean_steps": 300,
    "train.prompts_per_batch": 8,
    "train.prompts_per_minibatch": 8,
    "train.num_generations": 8,
    "optimizer.learning_rate": 0.0,
    "eval.every": 0,
}
SERVERS = {"sglang": "SGLang", "vllm": "vLLM"}
LABELS = {"mismatch/mean": "Mean over tokens", "mismatch/max": "Maximum over tokens"}


def main(output: Path, num_steps: int) -> None:
    """Trains with both servers, plots the mismatch and prints it."""
    settings = SETTINGS | {"base.cache_dir": output / "base"}
    embedded = settings | {"workdir": output / "embedded", "train.num_steps": 1}
    subprocess.run([sys.executable, "-m", "poly_epo_jax.main", *_flags(embedded)], check=True)
    (policy,) = (file.parent for file in (output / "base").glob("*/config.json"))
    for server in SERVERS:
        if len(read_rows(output / server / METRICS)) == num_steps:
            continue
        # The configured judge is not a server, so JUDGE_URL only prevents the start of one.
        variables = {"SERVER": server, "DEVICE": "cpu", "POLICY": str(policy), "JUDGE_URL": "http://127.0.0.1:1"}
        run = settings | {"workdir": output / server, "train.num_steps": num_steps}
        subprocess.run(["bash", "launch/node.sh", *_flags(run)], check=True, env=os.environ | variables)
    found = {server: read_rows(output / server / METRICS) for server in SERVERS}
    plot(found).savefig(output / "mismatch.png")
    for server, rows in found.items():
        for metric in LABELS:
            values = np.array([row[metric] for row in rows])
            first, last = (np.mean(part) for part in (values[: len(values) // 4], values[-(len(values) // 4) :]))
            print(f"{SERVERS[server]}: {metric} {first:.2e} in the first quarter, {last:.2e} in the last")


def plot(found: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Plots the mismatch of each step.

    Args:
      found: Logged metrics of the run with each server.
    """
    with report_style():
        figure = Figure(figsize=(8, 3), dpi=100, layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, (metric, label) in zip(panels, LABELS.items(), strict=True):
            for server, rows in found.items():
                steps, values = zip(*((row["step"], 1e6 * row[metric]) for row in rows), strict=True)
                axes.plot(steps, values, label=SERVERS[server], linewidth=1)
            axes.set(title=label, xlabel="step", ylabel="|difference of log p|, 1e-6 nats")
            axes.set_ylim(bottom=0)
        panels[-1].legend()
    return figure


def _flags(settings: Mapping[str, object]) -> list[str]:
    return [CONFIG, *(f"--config.{key}={value}" for key, value in settings.items())]


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(Path(given.get(1, "runs/mismatch")), int(given.get(2, "200")))
