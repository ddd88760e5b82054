"""The task of every side of step_peers.py: a GRPO step on `categories`, and how it is timed. Imports nothing heavy."""

import json
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence

CASE = "categories"
PROMPTS, GENERATIONS, MAX_TOKENS = 4, 8, 8
LEARNING_RATE, MAX_GRAD_NORM, CLIP_LOW, CLIP_HIGH = 3e-5, 1.0, 0.2, 0.28
WARM_UPS, STEPS = 3, 12


def arguments() -> tuple[str, Mapping[str, Sequence[str]]]:
    """A child's: the model's folder, and the right words of each prompt, as step_peers.py has written them."""
    folder, problems = sys.argv[1:]
    with open(problems) as file:
        return folder, json.load(file)


def report(
    seconds: Sequence[float], rewards: Sequence[float], setting: str, process: int = resource.RUSAGE_SELF
) -> None:
    """Prints a line of JSON: seconds and mean rewards of WARM_UPS + STEPS steps, of which the latter count.

    Args:
      process: whose peak memory counts, RUSAGE_SELF or RUSAGE_CHILDREN.
    """
    line = {
        "case": CASE,
        "seconds": statistics.median(seconds[WARM_UPS:]),
        "peak_gb": resource.getrusage(process).ru_maxrss * 1024 / 1e9,
        "reward": statistics.mean(rewards[WARM_UPS:]),
        "setting": setting,
    }
    print(json.dumps(line))
