"""Computes the metrics of a training step, and a row for each of its generations."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Array, Float, Int

from poly_epo_jax import set_rl
from poly_epo_jax.metrics.diversity import correct_clusters, degenerate_share, incorrect_clusters
from poly_epo_jax.parallel.compiler_options import Jit
from poly_epo_jax.records.run_folder import generation_rows
from poly_epo_jax.rollouts.grading import cluster_ids, clustered, judge_failures
from poly_epo_jax.rollouts.rewards import mean_parts
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.types import Generation, GradedGroup, Metrics

MIN_LOOP_REPETITIONS = 4
"""Minimum number of times that the last tokens of a loop are repeated."""
MIN_LOOP_TOKENS = 64
"""Minimum number of tokens of a loop, which excludes short repetitions such as a row of digits."""
_PROBE = 16  # number of tokens that are compared at all positions at once; less than any loop without its first period


def step_metrics(groups: Sequence[GradedGroup], step: int, set_size: int) -> Metrics:
    """Computes the metrics of a step's generations.

    Args:
      groups: Graded groups of all prompts of the step.
      step: The step.
      set_size: Set size n, for the cluster metrics.

    Returns:
      Means over generations and prompts, the number of prompts on which the judge failed, and cluster metrics.
    """
    generations = [generation for graded in groups for generation in graded.group.generations]
    failures = Counter(failure.kind for failure in judge_failures(groups))
    # Number of steps by which the weights that sampled a token were older than the policy that is trained.
    ages = np.concatenate([step - 1 - y.weight_versions[y.loss_mask] for y in generations])
    rollouts = {
        "reward": float(np.concatenate([graded.rewards for graded in groups]).mean()),
        "solved": float(np.mean([graded.correct.any() for graded in groups])),
        "response/length": mean_length(groups),
        "response/truncated": float(np.mean([generation.finish_reason == "length" for generation in generations])),
        "response/looped": float(np.mean([ends_in_loop(_last_turn(generation)) for generation in generations])),
        "response/staleness": float(ages.mean()),
        "response/max_staleness": float(ages.max()),
        "judge/failed_prompts": float(failures.total()),
    }
    failed = {f"judge/failed/{kind}": float(count) for kind, count in failures.items()} | mean_parts(groups)
    return (
        rollouts
        | failed
        | _source_metrics(groups)
        | _episode_metrics(generations)
        | cluster_metrics(clustered(groups), set_size)
    )


def _source_metrics(groups: Sequence[GradedGroup]) -> Metrics:
    """Returns the mean reward by dataset, if the prompts are from several datasets."""
    rewards: dict[str, list[float]] = {}
    for graded in groups:
        rewards.setdefault(graded.group.problem.source, []).extend(graded.rewards.tolist())
    return {f"data/reward/{name}": float(np.mean(rewards[name])) for name in sorted(rewards) if len(rewards) > 1}


def _episode_metrics(generations: Sequence[Generation]) -> Metrics:
    """Returns the mean number of turns of the policy, and the means of the metrics of outcomes."""
    values: dict[str, list[float]] = {}
    for generation in generations:
        if (outcome := generation.outcome) is not None:
            for name, value in ({"turns": (len(generation.turns) + 1) // 2} | dict(outcome.metrics)).items():
                values.setdefault(f"episode/{name}", []).append(float(value))
    return {name: float(np.mean(of_name)) for name, of_name in sorted(values.items())}


def mean_length(groups: Sequence[GradedGroup]) -> float:
    """Returns the mean number of generated tokens of the responses of at least one group."""
    return float(np.mean([generation.loss_mask.sum() for graded in groups for generation in graded.group.generations]))


def ends_in_loop(token_ids: Int[np.ndarray, " T"]) -> bool:
    """Returns True if the tokens end with a sequence that is repeated, without interruption, until the end.

    The sequence has any length p and occurs at least MIN_LOOP_REPETITIONS times, the first time possibly in part, in at
    least MIN_LOOP_TOKENS tokens. Loops in which a token changes, such as a counter, are not found.

    Args:
      token_ids: Tokens of a response, without its stop token.
    """
    reverse = token_ids[::-1]
    max_period = len(reverse) // MIN_LOOP_REPETITIONS
    if len(reverse) < MIN_LOOP_TOKENS:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(reverse[1 : max_period + _PROBE], _PROBE)
    for period in (np.flatnonzero((windows == reverse[:_PROBE]).all(axis=1)) + 1).tolist():
        length = max(MIN_LOOP_TOKENS, MIN_LOOP_REPETITIONS * period)
        if np.array_equal(reverse[period:length], reverse[: length - period]):
            return True
    return False


def _last_turn(generation: Generation) -> Int[np.ndarray, " T"]:
    """Returns the tokens of the policy's last turn, without the stop token."""
    start = max(np.flatnonzero(~generation.loss_mask), default=-1) + 1
    return generation.token_ids[start : -1 if generation.finish_reason == "stop" else None]


def cluster_metrics(groups: Sequence[GradedGroup], set_size: int) -> Metrics:
    """Computes the cluster metrics of prompts that have a clustering, as means over the prompts.

    Args:
      groups: Graded groups with a clustering. Without groups, there are no metrics.
      set_size: Set size n.

    Returns:
      The metrics. `clusters/synergy` is the mean absolute value of the covariance term of the marginal advantages, over
      the prompts with more than n generations.
    """
    if not groups:
        return {}
    clusters = cluster_ids(groups)
    rows = [(one.rewards[None], one.correct[None], ids[None]) for one, ids in zip(groups, clusters, strict=True)]
    # A single call with all prompts would compile its operations again for each number of prompts.
    synergy = [_synergy(rewards, ids, set_size=set_size) for rewards, _, ids in rows if ids.size > set_size]
    means = {
        "clusters/correct": np.mean([correct_clusters(ids, correct, ids.size) for _, correct, ids in rows]),
        "clusters/incorrect": np.mean([incorrect_clusters(ids, correct, ids.size) for _, correct, ids in rows]),
        "clusters/degenerate_fraction": degenerate_share(np.concatenate(clusters)),
    } | ({"clusters/synergy": np.abs(np.concatenate(synergy, axis=1)).mean()} if synergy else {})
    return {name: float(mean) for name, mean in means.items()}


@functools.partial(Jit, static_argnames="set_size")
def _synergy(rewards: Float[Array, "1 N"], clusters: Int[Array, "1 N"], *, set_size: int) -> Float[Array, "1 N"]:
    return set_rl.exploration_exploitation_synergy(rewards, clusters, set_size).synergy


def solved_problems(groups: Sequence[GradedGroup], positions: Mapping[str, int]) -> int:
    """Returns the problems with at least one correct generation, as the bits of an integer.

    Args:
      groups: Graded groups.
      positions: Bit of each problem, by id.
    """
    return sum(1 << positions[name] for name in {one.group.problem.id for one in groups if one.correct.any()})


def logged_generations(
    groups: Sequence[GradedGroup], usable: Sequence[GradedGroup], advantages: Float[np.ndarray, "P N"]
) -> list[Row]:
    """Creates the rows of generations.jsonl, without the step.

    Args:
      groups: Graded groups of all prompts of the step, with those that are left out.
      usable: Graded groups that take part in the update. Their clusterings are not logged.
      advantages: Advantages [P, N] of these P groups, see `group_advantages`. NaN for generations that are left out.

    Returns:
      The rows of `generation_rows`, with the advantage. It is None if the generation takes no part in the update. NaN
      is written as null.
    """
    advantages_of = dict(zip([graded.group for graded in usable], advantages.tolist(), strict=True))
    rows = []
    for graded in groups:
        own = {"occurrence": graded.group.problem.occurrence}
        known = dict(zip(graded.group.indices, advantages_of.get(graded.group, []), strict=False))
        rows += [row | own | {"advantage": known.get(row["generation"])} for row in generation_rows(graded)]
    return rows
