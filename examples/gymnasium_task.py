"""Trains on Gymnasium environments, whose observations and actions are text or are converted to text.

    pip install gymnasium==1.4.0
    python -m poly_epo_jax.main --config=examples/gymnasium_task.py --config.model.path=models/Qwen3-0.6B

Environments run in the worker processes of `rollouts.environment_workers`, because they compute. The environment
`my_module:Word-v0`, whose observations and actions are text, is registered by `my_module`, which the workers import.
`TEXTS` adds a text interface to other environments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]

from poly_epo_jax.config import default
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Outcome, Problem

MOVES = ("left", "down", "right", "up")


def frozen_lake_text(observation):
    """Describes the square of the default 4 x 4 map."""
    row, column = divmod(int(observation), 4)
    return (
        f"You are in row {row} and column {column} (from 0) of a frozen lake of 4 x 4 squares with holes. The gift is "
        "in row 3 and column 3. Answer with left, down, right or up."
    )


TEXTS: Mapping[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "FrozenLake-v1": (frozen_lake_text, MOVES.index),
}
"""By environment, a function that converts observations to text, and one that converts the policy's text to actions.

The second function raises ValueError for a text that is not an action.
"""


class GymnasiumEpisode:
    """An environment, whose start depends on the problem. Its reward is the sum of the rewards, limited to [0, 1]."""

    def __init__(self, task, problem):
        self.environment = gymnasium.make(task.environment, **task.settings)
        self.to_text, self.to_action = TEXTS.get(task.environment, (str, str))
        self.environment.reset(seed=int(problem.answer))
        self.reward, self.actions, self.num_invalid = 0.0, [], 0

    async def reply(self, generation):
        """Returns the observation after the action of the last turn, or None at the end of the episode."""
        text = generation.turns[-1].rpartition("</think>")[2].strip()
        try:
            action = self.to_action(text)
        except ValueError:
            self.num_invalid += 1
            return "This is not an action."
        self.actions.append(text)
        observation, reward, is_terminated, is_truncated, _ = self.environment.step(action)
        self.reward += float(reward)
        return None if is_terminated or is_truncated else self.to_text(observation)

    async def close(self):
        """Returns the reward. The strategy of an episode are its actions."""
        self.environment.close()
        metrics = {"actions": float(len(self.actions)), "invalid_actions": float(self.num_invalid)}
        return Outcome(min(max(self.reward, 0.0), 1.0), tuple(self.actions) or None, metrics=metrics)


class GymnasiumTask:
    """Problems with different seeds, whose prompts are the observations after `reset`.

    Args:
      environment: Name of the environment.
      settings: Arguments of `gymnasium.make`.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.
      chat: Whether observations are chat messages.
    """

    def __init__(
        self,
        environment: str = "FrozenLake-v1",
        settings: Mapping[str, Any] | None = None,
        num_train: int = 100,
        num_held_out: int = 20,
        chat: bool = True,
    ):
        self.environment, self.settings, self.chat = environment, dict(settings or {}), chat
        started, to_text = gymnasium.make(environment, **self.settings), TEXTS.get(environment, (str, str))[0]
        problems = []
        for seed in range(num_train + num_held_out):
            prompt = to_text(started.reset(seed=seed)[0])
            problems.append(Problem(f"{environment}/{seed}", prompt, answer=str(seed), chat=chat))
        self.train_problems: Sequence[Problem] = problems[:num_train]
        self.held_out_problems: Sequence[Problem] = problems[num_train:]

    def start(self, problem, seed):
        return GymnasiumEpisode(self, problem)


TASKS["gymnasium"] = GymnasiumTask


def get_config(config_string="poly_epo"):
    """Returns the configuration."""
    config = default.get_config(config_string)
    config.task.name, config.judge.name = "gymnasium", "exact"
    config.rollouts.environment_workers = 2
    config.workdir = "runs/gymnasium"
    return config
