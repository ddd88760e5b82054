"""A task for inspect-ai: the held-out problems of `polynomial`, with greedy decoding."""

from graded_problems import PROBLEMS, reward
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState


@scorer(metrics=[mean()])
def graded() -> Scorer:
    """Scores a response with the reward of the task."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=reward(str(state.sample_id), state.output.completion))

    return score


@task
def polynomial() -> Task:
    """Creates the task. The default solver sends the prompt of each problem once."""
    samples = [Sample(id=one.id, input=one.prompt, target=one.answer) for one in PROBLEMS.values()]
    return Task(dataset=samples, scorer=graded(), config=GenerateConfig(temperature=0, max_tokens=14))
