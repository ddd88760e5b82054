"""What about.json of an evaluation says: all that its generations and clusters follow from."""

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
    """As it is read back from the file: generations of equal descriptions are of one distribution.

    How many processes grade, and where the judge's server is, makes no difference.

    Args:
      weights: which ones, and of which step or version.
      judged: whether generations are clustered, where the configuration's judge does that.
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
