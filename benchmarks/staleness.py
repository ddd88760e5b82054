"""Compares degrees of staleness with a real server: python benchmarks/staleness.py MODEL [OUTPUT [STEPS]]

launch/node.sh trains MODEL, such as SmolLM2-135M-Instruct (`bash launch/smollm2.sh`), on Countdown in text with SGLang
on CPU: on-policy, one step off-policy, and up to three steps off-policy with weight updates during generation. Prints
the median seconds per step, and how many of them the trainer and the server are idle. Staleness, mismatch and reward
are means over the second half of the steps. The medians do not include the first step, which compiles. The last steps
only consume the queue, so the total is the better comparison of short runs. Runs that are complete are not repeated.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.records.run_folder import METRICS, TIMELINE, read_rows
from poly_epo_jax.records.timeline import Window

SETTINGS = {
    "task.name": "countdown_prose",
    "sampling.max_tokens": 12,
    "train.max_prompt_tokens": 64,
    "train.row_tokens": 160,  # a prompt and its eight responses
    "train.prompts_per_batch": 4,
    "train.prompts_per_minibatch": 4,
    "algo.importance_cap": 2.0,
    "optimizer.learning_rate": 1e-5,
    "eval.every": 0,
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "on-policy": {"train.staleness": 0},
    "staleness 1": {"train.staleness": 1},
    "staleness 3, in flight": {"train.staleness": 3, "rollouts.in_flight": True},
}
TRAINING = {"logprobs", "update"}
"""Stages in which the trainer computes."""
METRIC_NAMES = ("response/staleness", "mismatch/mean", "reward")


def main(model: str, output: Path, num_steps: int) -> None:
    """Trains each case and prints a table."""
    columns = ("seconds in total", "seconds per step", "trainer idle", "server idle", *METRIC_NAMES)
    print("| |", " | ".join(columns), "|\n|---|" + "---|" * len(columns))
    for name, changes in CASES.items():
        folder = output / name.replace(", ", "-").replace(" ", "-")
        if len(read_rows(folder / METRICS)) < num_steps:
            settings = {**SETTINGS, **changes, "workdir": folder, "train.num_steps": num_steps}
            settings |= {"checkpoint.every": num_steps}
            # The configured judge is not a server, so JUDGE_URL only prevents the start of one.
            variables = {"SERVER": "sglang", "DEVICE": "cpu", "POLICY": model, "JUDGE_URL": "http://127.0.0.1:1"}
            flags = ["--config=configs/smollm2.py", *(f"--config.{key}={value}" for key, value in settings.items())]
            subprocess.run(["bash", "launch/node.sh", *flags], check=True, env=os.environ | variables)
        windows = [Window.read(row) for row in read_rows(folder / TIMELINE)]
        times = (sum(window.seconds for window in windows), *seconds(windows[1:]))
        rows = read_rows(folder / METRICS)[num_steps // 2 :]
        means = [statistics.fmean(row[metric] for row in rows) for metric in METRIC_NAMES]
        print(f"| {name} |", " | ".join([*(f"{value:.1f}" for value in times), *(f"{x:.3g}" for x in means)]), "|")


def seconds(windows: Sequence[Window]) -> tuple[float, float, float]:
    """Returns the medians of the seconds of a step, and of its seconds without training and without generation."""
    training = [covered(span[1:3] for span in window.spans if span.stage in TRAINING) for window in windows]
    generation = [covered(span[1:3] for span in window.spans if span.stage == "generate") for window in windows]
    total = [window.seconds for window in windows]
    idle = [[whole - busy for whole, busy in zip(total, part, strict=True)] for part in (training, generation)]
    return statistics.median(total), statistics.median(idle[0]), statistics.median(idle[1])


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals, each with its start and end in seconds."""
    length, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(given[1], Path(given.get(2, "runs/staleness")), int(given.get(3, "10")))
