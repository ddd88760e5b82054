"""Computes rewards with several parts, whose functions have the interface of TRL's reward functions (`HasRewards`)."""

import asyncio
import dataclasses
import inspect
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.rollouts.returned_values import checked_part
from poly_epo_jax.system.daemon_thread import in_background_loop, in_daemon_thread
from poly_epo_jax.system.user_code import user_code
from poly_epo_jax.types import Generation, GradedGroup, HasRewards, Metrics, Problem, Reward


def reward_parts(task: HasRewards) -> list[Reward]:
    """Returns the parts of a task's reward, with their names.

    Raises:
      ConfigError: If a part is invalid, two parts have the same name, or all weights are 0.
    """
    given: Any = task.rewards
    parts = [one if isinstance(one, Reward) else Reward(one) for one in (given if _is_list(given) else [given])]
    names = [part.name or getattr(part.function, "__name__", type(part.function).__name__) for part in parts]
    for part, name in zip(parts, names, strict=True):
        if flaw := _flaw(part, name, names.count(name)):
            raise ConfigError(f"{type(task).__name__}.rewards[{name!r}] is invalid: {flaw}.")
    if not any(part.weight for part in parts):
        raise ConfigError(f"{type(task).__name__}.rewards must contain a reward with a weight above 0; add one.")
    return [dataclasses.replace(part, name=name) for part, name in zip(parts, names, strict=True)]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _flaw(part: Reward, name: str, count: int) -> str:
    if not callable(part.function):
        return f"{part.function!r} is not a function; use a function, or Reward(function)"
    if count > 1 or not re.fullmatch(r"[\w.-]+", name):
        return "names must be unique and consist of letters, digits, _, . and -; set Reward(function, name=...)"
    if not _is_finite(part.weight) or part.weight < 0:
        return f"its weight is {part.weight!r}; use a number of at least 0"
    if not (_is_list(part.range) and len(part.range) == 2 and all(map(_is_finite, part.range))):
        return f"its range is {part.range!r}; use two numbers, such as (0, 1)"
    return "" if part.range[0] < part.range[1] else f"its range is {part.range!r}; begin with the minimum"


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


async def response_reward(task: HasRewards, problem: Problem, generation: Generation) -> tuple[float, dict[str, float]]:
    """Computes the reward of a response. All parts are computed concurrently.

    Args:
      task: The task.
      problem: The problem.
      generation: The response.

    Returns:
      The weighted mean of the parts that are not None, and all parts by name, in [0, 1]. None is NaN.

    Raises:
      UserCodeError: If a part raises an exception.
      ValueError: If all parts with a weight above 0 are None.
      InvalidRewardError: If a part returns an invalid value.
      ConfigError: If the parts are invalid.
    """
    parts = reward_parts(task)
    running = [asyncio.ensure_future(_part(task, part, problem, generation)) for part in parts]
    try:
        values = await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
    present = [(part.weight, value) for part, value in zip(parts, values, strict=True) if not math.isnan(value)]
    total = sum(weight for weight, _ in present)
    if not total:
        raise ValueError("all rewards with a weight above 0 are None; return a number from at least one of them")
    reward = sum(weight * value for weight, value in present) / total
    return reward, {part.name: value for part, value in zip(parts, values, strict=True)}


async def _part(task: HasRewards, part: Reward, problem: Problem, generation: Generation) -> float:
    values = _arguments(problem, generation)
    with user_code(task, f"rewards[{part.name!r}]", problem.id):
        returned: Any = await in_daemon_thread(lambda: part.function(**values))
        if inspect.isawaitable(returned):
            returned = await in_background_loop(returned)
    return checked_part(task, part, problem, returned)


def _arguments(problem: Problem, generation: Generation) -> dict[str, list[Any]]:
    prompt, completion = problem.prompt, generation.text
    values = {"answer": problem.answer} | dict(problem.columns)
    values |= {
        "prompts": [{"role": "user", "content": prompt}] if problem.chat else prompt,
        "completions": [{"role": "assistant", "content": completion}] if problem.chat else completion,
        "completion_ids": generation.token_ids.tolist(),
        "problems": problem,
        "generations": generation,
    }
    return {name: [value] for name, value in values.items()}


def mean_parts(groups: Sequence[GradedGroup]) -> Metrics:
    """Returns the mean of each part of the rewards, as `rewards/NAME`, over the responses that have it."""
    values: dict[str, list[float]] = {}
    for graded in groups:
        for name, part in graded.parts.items():
            values.setdefault(f"rewards/{name}", []).extend(part[~np.isnan(part)].tolist())
    return {name: float(np.mean(of_name)) for name, of_name in sorted(values.items()) if of_name}
