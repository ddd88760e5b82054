"""Computes rewards with several parts, whose functions have the interface of TRL's reward functions (`HasRewards`)."""

import asyncio
import dataclasses
import inspect
import math
import re
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.rollouts.returned_values import checked_part
from poly_epo_jax.system.daemon_thread import in_background_loop, in_daemon_thread
from poly_epo_jax.types import Generation, GradedGroup, HasRewards, Interactive, Metrics, Problem, Reward

MAX_CALLS = 64
"""Maximum number of threads that run reward functions at the same time."""

_places = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()  # a semaphore belongs to one loop


def reward_parts(task: HasRewards) -> list[Reward]:
    """Returns the parts of a task's reward, with their names.

    Raises:
      ConfigError: If a part is invalid, two parts have the same name, all weights are 0, or the task is interactive.
    """
    given: Any = task.rewards
    given = given if isinstance(given, list | tuple) else [given]
    parts = [one if isinstance(one, Reward) else Reward(one) for one in given]
    names = [part.name or getattr(part.function, "__name__", type(part.function).__name__) for part in parts]
    for part, name in zip(parts, names, strict=True):
        is_name = names.count(name) == 1 and re.fullmatch(r"[\w.-]+", name)
        is_range = len(part.range) == 2 and all(map(_is_finite, part.range)) and part.range[0] < part.range[1]
        for is_valid, flaw in (
            (callable(part.function), f"{part.function!r} is not a function; use a function, or Reward(function)"),
            (is_name, "names are unique and consist of letters, digits, _, . and -; set Reward(function, name=...)"),
            (
                _is_finite(part.weight) and part.weight >= 0,
                f"its weight is {part.weight!r}; use a number of at least 0",
            ),
            (is_range, f"its range is {part.range!r}; use a minimum and a larger maximum, such as (0, 1)"),
            (not isinstance(task, Interactive), "episodes return their reward; remove rewards or the method start"),
        ):
            if not is_valid:
                raise ConfigError(f"{type(task).__name__}.rewards[{name!r}] is invalid: {flaw}.")
    if not any(part.weight for part in parts):
        raise ConfigError(f"{type(task).__name__}.rewards must contain a reward with a weight above 0; add one.")
    return [dataclasses.replace(part, name=name) for part, name in zip(parts, names, strict=True)]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class CallFailure(NamedTuple):
    """Kind and reason of the failure of a user's reward or judge."""

    kind: str
    reason: str


async def response_reward(
    task: HasRewards, problem: Problem, generation: Generation, limited: Callable[[Awaitable[Any], str], Awaitable[Any]]
) -> list[tuple[float, dict[str, float]]] | CallFailure:
    """Computes the reward of a response. All parts are computed concurrently, at most `MAX_CALLS` of them in threads.

    Args:
      task: The task.
      problem: The problem.
      generation: The response.
      limited: Function `(work, method) -> result` that awaits a call of a method, or returns its failure.

    Returns:
      A list with the weighted mean of the parts that are not None, and all parts by name, in [0, 1]. None is NaN. If a
      part fails, or if all parts with a weight above 0 are None, the failure.

    Raises:
      ValueError: If a part returns an invalid value.
      ConfigError: If the parts are invalid.
    """
    parts, arguments = reward_parts(task), _arguments(problem, generation)
    values: list[Any] = await asyncio.gather(*(_value(task, part, problem, arguments, limited) for part in parts))
    failures = [value for value in values if isinstance(value, CallFailure)]
    return failures[0] if failures else await limited(_weighted_mean(parts, values), "reward")


async def _weighted_mean(parts: Sequence[Reward], values: Sequence[float]) -> list[tuple[float, dict[str, float]]]:
    present = [(part.weight, value) for part, value in zip(parts, values, strict=True) if not math.isnan(value)]
    total = sum(weight for weight, _ in present)
    if not total:
        raise ValueError("all rewards with a weight above 0 are None; return a number from at least one of them")
    by_name = {part.name: value for part, value in zip(parts, values, strict=True)}
    return [(sum(weight * value for weight, value in present) / total, by_name)]


def _arguments(problem: Problem, generation: Generation) -> dict[str, list[Any]]:
    prompt, completion = problem.prompt, generation.text
    system = [{"role": "system", "content": problem.system}] if problem.system else []
    values = {"answer": problem.answer} | dict(problem.columns)
    values |= {
        "prompts": [*system, {"role": "user", "content": prompt}] if problem.chat else prompt,
        "completions": [{"role": "assistant", "content": completion}] if problem.chat else completion,
        "completion_ids": generation.token_ids.tolist(),
        "problems": problem,
        "generations": generation,
    }
    return {name: [value] for name, value in values.items()}


async def _value(
    task: HasRewards, part: Reward, problem: Problem, arguments: Mapping[str, list[Any]], limited: Callable[..., Any]
) -> float | CallFailure:
    places = _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_CALLS))
    await places.acquire()  # before the time limit starts
    found = await limited(_called(part, arguments, places), f"rewards[{part.name!r}]")
    return found if isinstance(found, CallFailure) else checked_part(task, part, problem, found)


async def _called(part: Reward, arguments: Mapping[str, list[Any]], places: asyncio.Semaphore) -> Any:
    try:
        found: Any = await in_daemon_thread(lambda: part.function(**arguments))
    finally:
        places.release()  # asynchronous functions have only been called, and are awaited without a thread
    return await in_background_loop(found) if inspect.isawaitable(found) else found


def mean_parts(groups: Sequence[GradedGroup]) -> Metrics:
    """Returns the mean of each part of the rewards, as `rewards/NAME`, over the responses that have it."""
    parts = {name: np.concatenate([one.parts[name] for one in groups]) for name in (groups[0].parts if groups else ())}
    return {f"rewards/{name}": float(np.nanmean(part)) for name, part in parts.items() if not np.isnan(part).all()}
