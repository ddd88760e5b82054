"""Problems and rewards of a task of this package, for lm_eval_polynomial.yaml and inspect_polynomial.py."""

from typing import Any

from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Generation

TASK = PolynomialTask()  # for your own problems: MathTask(train="problems.jsonl") and TASK.train_problems
PROBLEMS = {problem.id: problem for problem in TASK.held_out_problems}


def reward(problem_id: str, response: str) -> float:
    """Returns the reward of a response, from 0 to 1."""
    return TASK.reward(PROBLEMS[problem_id], Generation.from_turns(response))


def dataset(**_: Any) -> dict[str, Any]:
    """Returns the problems as `custom_dataset` of lm-evaluation-harness."""
    from datasets import Dataset

    rows = [{"id": one.id, "prompt": one.prompt, "answer": one.answer} for one in PROBLEMS.values()]
    return {"test": Dataset.from_list(rows)}


def process_results(row: dict[str, str], responses: list[str]) -> dict[str, float]:
    """Grades the response to a row of `dataset` for lm-evaluation-harness."""
    return {"reward": reward(row["id"], responses[0])}
