"""Task and timing that all implementations in step_peers.py share: GRPO steps on `categories`.

Imports no large packages.
"""

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
    """Returns the arguments of a child process: the folder of the model, and the correct words of each prompt."""
    folder, problems = sys.argv[1:]
    with open(problems) as file:
        return folder, json.load(file)


def report(
    seconds: Sequence[float], rewards: Sequence[float], setting: str, process: int = resource.RUSAGE_SELF
) -> None:
    """Prints the results as a line of JSON. The first WARM_UPS steps are ignored.

    Args:
      seconds: Seconds of each step.
      rewards: Mean reward of each step.
      setting: Description of the implementation's configuration.
      process: Processes whose peak memory is reported: RUSAGE_SELF or RUSAGE_CHILDREN.
    """
    line = {
        "case": CASE,
        "seconds": statistics.median(seconds[WARM_UPS:]),
        "peak_gb": resource.getrusage(process).ru_maxrss * 1024 / 1e9,
        "reward": statistics.mean(rewards[WARM_UPS:]),
        "setting": setting,
    }
    print(json.dumps(line))
