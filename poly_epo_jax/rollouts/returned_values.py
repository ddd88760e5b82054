"""Validates the values that tasks, judges and samplers return, because users may have implemented these components."""

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from reprlib import repr as _brief
from typing import Any

import numpy as np
from jaxtyping import Float

from poly_epo_jax.judges import NOT_CLUSTERING
from poly_epo_jax.judges.exact import COUNTING_CLUSTERS
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.metrics.logged import is_reserved
from poly_epo_jax.system.daemon_thread import call_with_timeout, in_daemon_thread
from poly_epo_jax.system.user_code import is_own, user_code
from poly_epo_jax.types import (
    Clustering,
    Group,
    HasMetrics,
    Judge,
    JudgeFailure,
    LimitsReplies,
    Metrics,
    Outcome,
    PartialCredit,
    Problem,
    Reward,
    Task,
)

_INT32 = np.iinfo(np.int32)


def checked_reply(name: str, problem: Problem, reply: Any) -> str | None:
    """Validates and returns the reply of an episode.

    Args:
      name: Name of the class of the episode.
      problem: Problem of the episode.
      reply: The returned value.

    Raises:
      ValueError: If the reply is neither a string nor None.
    """
    if not isinstance(reply, str | None):
        raise ValueError(
            f"{name}.reply returned {_describe(reply)} for problem {problem.id!r}; return a string, or None "
            "to end the episode."
        )
    return reply


def checked_outcome(name: str, problem: Problem, outcome: Any) -> Outcome:
    """Validates and returns the outcome of an episode.

    Args:
      name: Name of the class of the episode.
      problem: Problem of the episode.
      outcome: The returned value.

    Raises:
      ValueError: If it is not an `Outcome`, or one of its fields is invalid.
    """
    if flaw := _flaw_of_outcome(outcome):
        raise ValueError(f"{name}.close returned an invalid outcome for problem {problem.id!r}: {flaw}.")
    return outcome


def _flaw_of_outcome(outcome: Any) -> str:
    if not isinstance(outcome, Outcome):
        return f"it is {_describe(outcome)}; return an Outcome, such as Outcome(reward=1.0)"
    if (reward := _number(outcome.reward)) is None or not 0 <= reward <= 1 + 2**-24:
        return f"its reward is {_describe(outcome.reward)}; use a number from 0 to 1"
    if not isinstance(outcome.correct, bool | np.bool_ | None):
        return f"its correct is {_describe(outcome.correct)}; use True, False or None"
    if not _is_hashable(outcome.strategy):
        return f"its strategy is {_describe(outcome.strategy)}; use a string, number or tuple, or None"
    if not isinstance(outcome.metrics, Mapping):
        return f"its metrics are {_describe(outcome.metrics)}; use a dict of numbers by name"
    for name, value in outcome.metrics.items():
        number = _number(value)
        if not isinstance(name, str) or number is None or not abs(number) <= sys.float_info.max:
            return f"its metric {name!r} is {_describe(value)}; use finite numbers, with strings as names"
    return ""


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def checked_rewards(task: Task, problem: Problem, rewards: Sequence[Any]) -> Float[np.ndarray, " N"]:
    """Validates the rewards of N generations, and returns them as an array [N], float32.

    Args:
      task: Task that returned the rewards.
      problem: Problem of the generations.
      rewards: The N returned values.

    Raises:
      ValueError: If a value is not a number from 0 to 1. Strings and booleans are not numbers.
    """
    numbers = [_number(reward) for reward in rewards]
    for reward, number in zip(rewards, numbers, strict=True):
        if number is None or not 0 <= number <= 1 + 2**-24:  # float32 rounds valid numbers to at most 1.
            raise ValueError(
                f"{type(task).__name__}.reward returned {_describe(reward)} for problem {problem.id!r}, but a reward "
                "must be a number from 0 to 1; return a float, such as 1.0."
            )
    return np.array(numbers, np.float32)


def checked_part(task: Task, part: Reward, problem: Problem, returned: Any) -> float:
    """Validates the result of a reward function for one response, and rescales it to [0, 1].

    Args:
      task: Task of the part.
      part: The part of the reward, with its name.
      problem: Problem of the response.
      returned: The result.

    Returns:
      The value, or NaN for None.

    Raises:
      ValueError: If the result is not a list of one number in the range of the part, or of None.
    """
    is_list = isinstance(returned, list | tuple) or np.ndim(returned) == 1
    value, (low, high) = returned[0] if is_list and len(returned) == 1 else "", part.range
    if value is None:
        return math.nan
    number, rounding = _number(value), (high - low) * 2**-24
    if number is None or not low - rounding <= number <= high + rounding:
        raise ValueError(
            f"{type(task).__name__}.rewards[{part.name!r}] returned {_describe(returned)} for problem {problem.id!r}, "
            f"but must return a list with one number from {low:g} to {high:g}, or None, for the one completion; return "
            "floats, or set Reward(function, range=(minimum, maximum))."
        )
    return min(max((number - low) / (high - low), 0.0), 1.0)


def minimum_correct(task: Task) -> float:
    """Returns the minimum reward of a correct response.

    Raises:
      ValueError: If the task's `correct_from` is not a number from 0 to 1.
    """
    minimum = task.correct_from if isinstance(task, PartialCredit) else 1.0
    number = _number(minimum)
    if number is None or not 0 <= number <= 1:
        raise ValueError(
            f"{type(task).__name__}.correct_from is {_describe(minimum)}, but must be a number from 0 to 1; correct it."
        )
    return float(number)


def maximum_reply(task: Task) -> int | None:
    """Returns the maximum number of tokens of a reply that an environment declares, or None.

    Raises:
      ValueError: If `max_reply_tokens` is neither a positive integer nor None.
    """
    limit = task.max_reply_tokens if isinstance(task, LimitsReplies) else None
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(
            f"{type(task).__name__}.max_reply_tokens is {_describe(limit)}, but must be a positive integer or None; "
            "correct it."
        )
    return limit


class InvalidClusteringError(ValueError):
    """Raised when a judge returns an invalid value. It stops the run, also if a user has defined the judge."""


def checked_clustering(judge: Judge, group: Group, returned: Any) -> Clustering | JudgeFailure | None:
    """Validates and returns the result of a judge for a group.

    Args:
      judge: Judge that returned the result.
      group: The group.
      returned: The result.

    Raises:
      InvalidClusteringError: If the result is neither a valid clustering nor a failure, or if a judge that clusters
        returns None.
    """
    if returned is None and _may_return_none(judge):
        return None
    if flaw := _flaw(returned, len(group.generations), not isinstance(judge, LLMJudge)):
        raise InvalidClusteringError(
            f"{type(judge).__name__}.cluster returned an invalid result for problem {group.problem.id!r}: {flaw}."
        )
    return returned


def _may_return_none(judge: Judge) -> bool:
    return type(judge) in NOT_CLUSTERING or any(map(_may_return_none, getattr(judge, "parts", ())))


async def checked_counts(*components: Any, timeout_seconds: float = 600.0) -> Metrics:
    """Collects and validates the counters of tasks, judges and samplers, for those that have counters.

    Args:
      *components: The components. Their counters have different names.
      timeout_seconds: Maximum time in seconds of a call of a user's component.

    Raises:
      UserCodeError: If a component of a user raises an exception.
      LateCallError: If a component of a user does not return in time.
      ValueError: If the counters are not a dict of finite numbers or NaN, or if a name is already in use.
    """
    numbers: Metrics = {}
    for component in (one for one in components if isinstance(one, HasMetrics)):
        class_name = type(component).__name__
        call = functools.partial(call_with_timeout, component.metrics, timeout_seconds, f"{class_name}.metrics")
        with user_code(component, "metrics"):
            counts: Any = await in_daemon_thread(call) if is_own(component) else component.metrics()
        if not isinstance(counts, Mapping):
            raise ValueError(
                f"{class_name}.metrics returned {_describe(counts)}; return a dict of numbers by name, such as "
                "{'task/invalid': 2.0}."
            )
        for name, value in counts.items():
            number = _number(value)
            if not isinstance(name, str) or number is None or abs(number) > sys.float_info.max:
                raise ValueError(
                    f"{class_name}.metrics returned {_describe(value)} for {name!r}; return finite numbers or NaN, "
                    "with strings as names."
                )
            if name in numbers or is_reserved(name):
                raise ValueError(
                    f"{class_name}.metrics returned {name!r}, which is the name of another metric; choose another "
                    f"name, such as '{class_name}/{name.rpartition('/')[2]}'."
                )
            numbers[name] = float(number)
    return numbers


def _flaw(returned: Any, num_responses: int, may_count: bool) -> str:
    """Describes why the result of a judge is invalid, and the remedy. Returns "" for a valid result."""
    match returned:
        case Clustering(ids, rationales, features):
            return (
                _flaw_of_ids(ids, num_responses, may_count)
                or _flaw_of_rationales(rationales, num_responses)
                or _flaw_of_features(features, num_responses)
            )
        case JudgeFailure(str(), str()):
            return ""
        case JudgeFailure(kind, reason):
            return f"kind and reason of the failure are {_describe(kind)} and {_describe(reason)}; use strings"
    return f"it is {_describe(returned)}; return a Clustering, or a JudgeFailure if clustering failed"


def _flaw_of_ids(ids: Any, num_responses: int, may_count: bool) -> str:
    is_integer = getattr(getattr(ids, "dtype", None), "kind", "") in ("i", "u")
    if not is_integer or ids.shape != (num_responses,) or ids.min() < _INT32.min or ids.max() > _INT32.max:
        return (
            f"its ids are {_describe(ids)}; return an int32 array with one id for each of the {num_responses} "
            "responses, such as np.array([0, 1], np.int32)"
        )
    if may_count and set(COUNTING_CLUSTERS) <= set(ids.tolist()):
        return (
            "its ids contain both 99 and 100, but 100 is reserved for degenerate responses, and ids that count up "
            "must not reach it; number the clusters with poly_epo_jax.judges.exact.clusters_of"
        )
    return ""


def _flaw_of_rationales(rationales: Any, num_responses: int) -> str:
    are_texts = isinstance(rationales, list | tuple) and all(isinstance(text, str) for text in rationales)
    if rationales is None or (are_texts and len(rationales) == num_responses):
        return ""
    return f"its rationales are {_describe(rationales)}; return a string for each of the {num_responses} responses"


def _flaw_of_features(features: Any, num_responses: int) -> str:
    if not isinstance(features, Mapping):
        return f"its features are {_describe(features)}; return a dict of arrays by name"
    for name, feature in features.items():
        try:
            is_valid = np.shape(feature)[:1] == (num_responses,) and bool(np.isfinite(feature).all())
        except (TypeError, ValueError):  # The feature is not numeric, or its rows have different lengths.
            is_valid = False
        if not is_valid:
            return (
                f"its feature {name!r} is {_describe(feature)}; return finite numbers with one row for each of the "
                f"{num_responses} responses"
            )
    return ""


def _number(value: Any) -> int | float | None:
    """Converts a number or a scalar of NumPy, JAX or torch to a Python number. Returns None for other values."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", ())
    kind = f"{value.dtype} array of shape {tuple(shape)}" if shape else type(value).__name__
    return f"{_brief(value)} ({kind})"
