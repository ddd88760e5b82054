"""The content of an evaluation's about.json: everything that determines its generations and clusters."""

import dataclasses
import json
from typing import Any

from poly_epo_jax.config import Config
from poly_epo_jax.evaluation.benchmarks import task_options
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.types import Sampling


def about_evaluation(
    config: Config, benchmark: str, weights: str, num_generations: int, judged: bool
) -> dict[str, Any]:
    """The description as it is read back from the file. Generations with equal descriptions have one distribution.

    The number of grading processes and the address of the judge's server are left out, as they change nothing.

    Args:
      weights: which weights, and which step or version of them.
      judged: whether to cluster the generations with the configuration's judge, if it clusters any.
    """
    judge = config.judge
    clustering = {"name": judge.name, "model": judge.model, "options": dict(judge.options)}
    options = task_options(benchmark, config.task)
    about = {
        "benchmark": benchmark,
        "task_options": {key: value for key, value in options.items() if key != "num_workers"},
        "model": weights,
        "stop_strings": config.model.stop_strings,
        "num_generations": num_generations,
        "sampling": dataclasses.asdict(Sampling(**config.sampling, seed=config.seed)),
        "judge": clustering if judged and JUDGES[judge.name].clusters else None,
    }
    return json.loads(json.dumps(about))
