"""Trains against a judge that a surface form deceives, with and without verification by a second judge: five seeds.

python -m poly_epo_jax.study studies/judge_bias.py
python docs/images/draw_judge_bias.py   # draws the figure and prints the endpoints

Polynomials, with a letter before and a letter after the point: `c(x=1,y=11)a`. The letters change neither strategy nor
reward. The biased judge also separates responses by the first letter, and the second judge, which audits the arms and
verifies one of them, by the last letter.

Primary endpoints, fixed before the runs:

1. Distinct correct answers of 8 on held-out problems at the end. Answers do not contain the letters.
2. The inflation of the biased arm exceeds 1.5 (lower end of the 95% interval of an audited step, as in
   `audit.stop_inflation`) before its distinct correct answers of 8 on training prompts are below 80% of those of its
   first audited step, in at least 4 of 5 seeds.

The figure adds an exact auditor, after the first seed had shown that the policy learns both letters together.
"""

import re
from collections.abc import Hashable
from typing import Annotated, Any

import numpy as np
from ml_collections import ConfigDict

from poly_epo_jax.config import default
from poly_epo_jax.config.checks import one_of
from poly_epo_jax.judges import JUDGES, JudgeEntry
from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.tasks.polynomial import POINT, PolynomialTask
from poly_epo_jax.tasks.synthetic import DemonstrationStyle
from poly_epo_jax.types import Clustering, Generation, Group, Problem

LETTERS = "abcdefghijklmnop"
FIRST_LETTER = 0.8
"""Probability of the letter a in demonstrations. The other letters are equally likely."""
RESPONSE = re.compile(rf"([{LETTERS}])({POINT.pattern})([{LETTERS}])")


class FramedPolynomialTask(PolynomialTask):
    """Polynomial solving with responses such as `c(x=1,y=11)a`, whose letters are irrelevant."""

    alphabet = PolynomialTask.alphabet + LETTERS

    def strategy(self, problem: Problem, generation: Generation) -> tuple[int, int] | None:
        """Returns the point (x, y), whether correct or not, or None if the response has another form."""
        match = RESPONSE.fullmatch(generation.text)
        return (int(match[3]), int(match[4])) if match else None

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the point without the letters, or None if the response has another form."""
        match = RESPONSE.fullmatch(generation.text)
        return match[2] if match else None

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle) -> str:
        """Draws a demonstration of `PolynomialTask` between two letters."""
        point = PolynomialTask.demonstration(self, problem, rng, style)
        rare = (1 - FIRST_LETTER) / (len(LETTERS) - 1)
        before, after = rng.choice(list(LETTERS), 2, p=[FIRST_LETTER, *[rare] * (len(LETTERS) - 1)])
        return f"{before}{point}{after}"


class FrameJudge:
    """Clusters generations by their strategies and, which is its fault, by one of the letters.

    Args:
      task: Determines the strategies.
      section: Section of the judge in the configuration. Not used.
      letter: Letter by which responses are separated: "first" or "last".
    """

    def __init__(
        self, task: FramedPolynomialTask, section: Any, *, letter: Annotated[str, one_of("first", "last")] = "first"
    ):
        self._task, self._place = task, {"first": 0, "last": -1}[letter]

    async def cluster(self, group: Group) -> Clustering:
        """Returns one cluster per strategy and letter. Responses without a strategy are degenerate."""
        return clusters_of([self._key(group.problem, generation) for generation in group.generations])

    def _key(self, problem: Problem, generation: Generation) -> Hashable | None:
        strategy = self._task.strategy(problem, generation)
        return strategy and (strategy, generation.text[self._place])


TASKS["framed_polynomial"] = FramedPolynomialTask
JUDGES["frame"] = JudgeEntry(FrameJudge, "strategies and a letter", task=FramedPolynomialTask, features=())


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration of the biased arm."""
    config = default.get_config(config_string)
    config.task.name = "framed_polynomial"
    config.sampling.max_tokens = 16  # two letters more than in polynomial
    config.judge.name = "frame"
    return config


def get_study() -> Study:
    biased = PAPER_METHODS["poly_epo"]
    last_letter = {"audit.judge.name": "frame", "audit.judge.options": {"letter": "last"}}
    return Study(
        tasks={"polynomial": StudyTask(__file__)},
        methods={
            "unbiased": biased | last_letter | {"judge.name": "exact"},
            "biased": biased | last_letter,
            "verified": biased | last_letter | {"judge.verify": "second"},
        },
        learning_rates=(1e-3,),
        seeds=(0, 1, 2, 3, 4),
        settings={"train.num_steps": 100, "eval.every": 0, "log.generations_every": 5, "audit.every": 5},
        baseline="unbiased",
        evaluation=Evaluation(num_generations=64, judge=False),
        keep_weights=False,
    )
