"""Registry of tasks with verifiable rewards.

To add a task, implement the `types.Task` protocol in a new file and add one line to `TASKS`.
"""

from collections.abc import Callable

from poly_epo_jax.registry import Registry
from poly_epo_jax.tasks.countdown import CountdownProseTask, CountdownTask
from poly_epo_jax.tasks.guess_number import GuessNumberTask
from poly_epo_jax.tasks.math import MathTask
from poly_epo_jax.tasks.multiplication import MultiplicationProseTask, MultiplicationTask
from poly_epo_jax.tasks.one_word import CategoriesTask, PrefixesTask
from poly_epo_jax.tasks.polynomial import PolynomialProseTask, PolynomialTask
from poly_epo_jax.tasks.reasoning_gym import ReasoningGymTask
from poly_epo_jax.tasks.synthetic import DemonstrationStyle
from poly_epo_jax.tasks.textarena import TextArenaTask
from poly_epo_jax.tasks.tool_environment import ToolEnvironmentTask
from poly_epo_jax.types import Task

TASKS: Registry[Callable[..., Task]] = Registry(
    polynomial=PolynomialTask,
    polynomial_prose=PolynomialProseTask,
    multiplication=MultiplicationTask,
    multiplication_prose=MultiplicationProseTask,
    countdown=CountdownTask,
    countdown_prose=CountdownProseTask,
    guess_number=GuessNumberTask,
    math=MathTask,
    reasoning_gym=ReasoningGymTask,
    textarena=TextArenaTask,
    tool_environment=ToolEnvironmentTask,
    categories=CategoriesTask,
    prefixes=PrefixesTask,
)
"""Tasks by the name that `task.name` selects. `task.options` are the keyword arguments of the class."""

__all__ = [
    "TASKS",
    "CategoriesTask",
    "CountdownProseTask",
    "CountdownTask",
    "DemonstrationStyle",
    "GuessNumberTask",
    "MathTask",
    "MultiplicationProseTask",
    "MultiplicationTask",
    "PolynomialProseTask",
    "PolynomialTask",
    "PrefixesTask",
    "ReasoningGymTask",
    "TextArenaTask",
    "ToolEnvironmentTask",
]
