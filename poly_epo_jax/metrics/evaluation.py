"""Registry of the metrics that evaluations compute from the generations of each problem.

Every evaluation, table and figure reads function, title and format from `EVALUATION_METRICS`. A metric that depends on
a number k of generations is named `NAME@k`, such as `pass@8`. A configuration file can register further metrics.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from poly_epo_jax.metrics.diversity import correct_clusters, incorrect_clusters
from poly_epo_jax.metrics.intervals import ROUNDING
from poly_epo_jax.metrics.majority import NO_ANSWER, answer_entropy, cached_majority_at_k
from poly_epo_jax.metrics.pass_at_k import best_of_k, is_covered, pass_at_k
from poly_epo_jax.registry import Registry
from poly_epo_jax.system.daemon_thread import call_with_timeout
from poly_epo_jax.system.user_code import user_line

PASS, MEAN_REWARD, BEST_REWARD, CORRECT_CLUSTERS = "pass", "mean_reward", "best_reward", "correct_clusters"
MAJORITY_ACCURACY, MAJORITY_VOTE_SHARE = "majority_accuracy", "majority_vote_share"

ARRAYS = ("rewards", "graded_rewards", "correct", "answers", "clusters", "lengths")
"""Arrays that a metric can read. Evaluations during training have rewards, `correct` and `clusters` only."""


@dataclasses.dataclass(frozen=True)
class EvaluationMetric:
    """A metric with one value per problem, computed from the m generations of the problem.

    Attributes:
      function: Function that maps arrays of P problems to values [P]. Its parameters select the arrays, each of shape
        [P, m]: `rewards`, `correct` (bool), `answers` (ids, see `majority_at_k`), `clusters` (ids), `lengths`
        (tokens), and `graded_rewards`, the rewards of an evaluation in which some are neither 0 nor 1. A metric is
        omitted if the evaluation does not have its arrays; `answers` exist if some generation has an answer. Functions
        of `clusters` only receive the problems that have a clustering. If the function also has a parameter `k`, the
        metric is computed for several k.
      title: Name in tables and figures. `{k}` is replaced by k.
      meaning: One sentence that defines the metric. `{k}` is replaced by k.
      digits: Number of decimals in tables.
      every_k: Whether the metric is computed at every k from 1 to m, instead of at powers of two. Evaluations during
        training always use powers of two. If True, tables show the metric at k = 1 and at the largest k, instead of at
        the largest k only.
      tables: Commands whose tables have the metric as a column.
      is_fraction: Whether all values lie in [0, 1] by definition. Confidence intervals over problems are then computed
        by `fraction_interval`, otherwise by `bootstrap_interval`.

    Raises:
      ValueError: If a parameter of `function` is neither `k` nor one of `ARRAYS`.
    """

    function: Callable[..., Float[np.ndarray, " P"]]
    title: str
    meaning: str
    digits: int = 3
    every_k: bool = False
    tables: Collection[str] = ("evaluate", "report", "study")
    is_fraction: bool = False

    def __post_init__(self):
        if unknown := self.parameters - {"k", *ARRAYS}:
            raise ValueError(
                f"The function of the metric {self.title!r} has the parameter {min(unknown)!r}; use only "
                f"{', '.join(ARRAYS)} and k."
            )

    @property
    def parameters(self) -> set[str]:
        """Names of the parameters of `function`."""
        return set(inspect.signature(self.function).parameters)

    def sizes(self, candidates: Sequence[int]) -> Sequence[int | None]:
        """Returns the candidates for k if the metric depends on k, and a single None otherwise."""
        return candidates if "k" in self.parameters else (None,)


EVALUATION_METRICS: Registry[EvaluationMetric] = Registry(
    {
        PASS: EvaluationMetric(
            lambda correct, k: pass_at_k(correct.shape[1], correct.sum(axis=1), k),
            "pass@{k}",
            "Probability that at least one of {k} generations of a problem is correct.",
            is_fraction=True,
            every_k=True,
        ),
        MEAN_REWARD: EvaluationMetric(
            lambda graded_rewards: graded_rewards.mean(axis=1),
            "mean reward",
            "Mean reward of a generation. Omitted if all rewards are 0 or 1: it then equals pass@1.",
            is_fraction=True,
        ),
        BEST_REWARD: EvaluationMetric(
            lambda graded_rewards, k: best_of_k(graded_rewards, k),
            "best of {k}",
            "Expected largest reward of {k} generations. Omitted if all rewards are 0 or 1: it then equals pass@{k}.",
            is_fraction=True,
        ),
        MAJORITY_ACCURACY: EvaluationMetric(
            lambda answers, correct, k: cached_majority_at_k(answers, correct, k)[0],
            "majority@{k} accuracy",
            "Accuracy of the most frequent answer among {k} generations. Ties are broken at random.",
            is_fraction=True,
        ),
        MAJORITY_VOTE_SHARE: EvaluationMetric(
            lambda answers, correct, k: cached_majority_at_k(answers, correct, k)[1],
            "majority@{k} vote share",
            "Fraction of {k} generations that give the most frequent answer.",
            is_fraction=True,
            tables=("evaluate", "report"),
        ),
        "solved": EvaluationMetric(
            lambda correct: correct.any(axis=1).astype(float),
            "solved",
            "Fraction of problems with at least one correct generation.",
            is_fraction=True,
            tables=(),
        ),
        **{
            f"cover@{tau}": EvaluationMetric(
                functools.partial(is_covered, tau),
                f"cover@{tau}",
                f"Problems with at least {tau:.0%} correct generations (plug-in estimate).",
                is_fraction=True,
                tables=("evaluate",),
            )
            for tau in (0.2, 0.5, 0.8)
        },
        "answer_entropy": EvaluationMetric(
            answer_entropy,
            "answer entropy",
            "Entropy of the distinct answers of a problem, in nats. Missing answers count as one answer.",
            digits=2,
            tables=("report",),
        ),
        "response_length": EvaluationMetric(
            lambda lengths: lengths.mean(axis=1),
            "response length",
            "Mean number of tokens of a generation.",
            digits=0,
            tables=("report",),
        ),
        CORRECT_CLUSTERS: EvaluationMetric(
            correct_clusters,
            "correct clusters@{k}",
            "Expected number of distinct clusters among the correct ones of {k} generations of a problem.",
            digits=2,
        ),
        "incorrect_clusters": EvaluationMetric(
            incorrect_clusters,
            "incorrect clusters@{k}",
            "Expected number of distinct clusters among the incorrect ones of {k} generations of a problem.",
            digits=2,
            tables=("report", "study"),
        ),
    }
)
"""Evaluation metrics by name, without k."""


def at(stem: str, k: int | None) -> str:
    """Returns the name of a metric at k: `pass@8`. If k is None, returns `stem`."""
    return stem if k is None else f"{stem}@{k}"


def split(name: str) -> tuple[str, int | None]:
    """Splits a name into stem and k: ("pass", 8). k is None for a metric that does not depend on k."""
    stem, _, k = name.partition("@")
    return (stem, int(k)) if k.isdigit() else (name, None)


def binary_metric(name: str) -> str:
    """Returns the name of the metric that a metric of graded rewards equals, and is replaced by, if all are 0 or 1."""
    return name.replace(BEST_REWARD, PASS).replace(MEAN_REWARD, at(PASS, 1))


def powers_of_two(largest: int) -> list[int]:
    """Returns 1, 2, 4, ... up to `largest`."""
    return [2**power for power in range(largest.bit_length())]


def describe(name: str) -> EvaluationMetric:
    """Returns the entry of an evaluation metric, with title and meaning at its k.

    A metric without an entry has its name as title. Reports do not execute configuration files, so they show the
    metrics of a configuration file in this way.
    """
    stem, k = split(name)
    if stem not in EVALUATION_METRICS:
        return EvaluationMetric(lambda: np.zeros(0), name, "")
    metric = EVALUATION_METRICS[stem]
    return dataclasses.replace(metric, title=metric.title.format(k=k), meaning=metric.meaning.format(k=k))


def problem_values(
    arrays: Mapping[str, Shaped[np.ndarray, "P m"] | Sequence[Shaped[np.ndarray, " _"]]],
    reading: str = "",
    curves: bool = True,
    timeout_seconds: float = 600.0,
) -> dict[str, Float[np.ndarray, " _"]]:
    """Computes all registered metrics whose arrays are given.

    Metrics at k leave out the problems with fewer than k generations, because failed ones are missing. They are omitted
    at the k that most problems lack.

    Args:
      arrays: Arrays by name, see `EvaluationMetric.function`, or lists with an array [m] for each problem, if m differs
        between problems. `correct` is required.
      reading: If not empty, only metrics that read this array are computed.
      curves: Whether metrics with `every_k` are computed at every k. If False, k is a power of two for all metrics.
      timeout_seconds: Maximum time in seconds of a call of a metric.

    Returns:
      Values by name, such as `pass@8`, of the problems with at least k generations.

    Raises:
      ValueError: If a metric raises an exception, does not return in time, or does not return a finite value for each
        problem, if a value of a fraction is not in [0, 1], or if two metrics have the same name.
    """
    sizes = np.array([len(row) for row in arrays["correct"]])
    if "rewards" in arrays and not np.isin(np.concatenate(arrays["rewards"]), (0, 1)).all():
        arrays = {**arrays, "graded_rewards": arrays["rewards"]}
    if "answers" in arrays and (np.concatenate(arrays["answers"]) == NO_ANSWER).all():
        arrays = {name: array for name, array in arrays.items() if name != "answers"}
    places = {size: np.flatnonzero(sizes == size).tolist() for size in np.unique(sizes).tolist()}
    parts = {
        size: {name: np.stack([array[place] for place in own]) for name, array in arrays.items()}
        for size, own in places.items()
    }
    values: dict[str, np.ndarray] = {}
    largest = int(np.sort(sizes)[len(sizes) // 2])  # at least half of the problems have as many generations
    for stem, metric in EVALUATION_METRICS.items():
        read = metric.parameters - {"k"}
        if not read <= arrays.keys() or (reading and reading not in read):
            continue
        ks = range(1, largest + 1) if metric.every_k and curves else powers_of_two(largest)
        for k in metric.sizes(ks):
            if (name := at(stem, k)) in values:
                raise ValueError(f"Two evaluation metrics are named {name!r}; register {stem!r} under another name.")
            column = np.zeros(len(sizes))
            for size, own in places.items():
                if size >= (k or 1):
                    given = {array: parts[size][array] for array in read} | ({} if k is None else {"k": k})
                    column[own] = _values(stem, metric, given, len(own), timeout_seconds)
            values[name] = column[sizes >= (k or 1)]
    return values


def _values(
    stem: str, metric: EvaluationMetric, arguments: Mapping[str, Any], num_problems: int, timeout_seconds: float
) -> np.ndarray:
    """Calls the function of a metric, and checks its values [P]."""
    call = functools.partial(metric.function, **arguments)
    try:
        found = np.asarray(call_with_timeout(call, timeout_seconds, f"The function of the evaluation metric {stem!r}"))
    except Exception as error:
        if not (line := user_line(error)):
            raise
        raise ValueError(
            f"The function of the evaluation metric {stem!r} raised {type(error).__name__}{line}: {error}; correct it."
        ) from error
    if found.shape != (num_problems,) or found.dtype.kind not in "biuf" or not np.isfinite(found).all():
        raise ValueError(
            f"The function of the evaluation metric {stem!r} must return a finite value for each of the {num_problems} "
            "problems; correct it."
        )
    if metric.is_fraction and np.any(np.abs(found - 0.5) > 0.5 + ROUNDING):
        raise ValueError(
            f"The evaluation metric {stem!r} has a value outside [0, 1]; correct its function, or remove "
            "is_fraction=True."
        )
    return found


def omissions(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns sentences about metrics and generations that evaluations omit, or an empty string.

    Args:
      results: Results of models on a benchmark, see `evaluate.results.compute_results`.
    """
    names = {split(name)[0] for one in results for name in one["metrics"]}
    sentences = []
    if MAJORITY_ACCURACY not in names:
        sentences.append("Majority voting is omitted, because no response has an answer (`answer` of the task).")
    if failed := sum(one.get("num_failed", 0) for one in results):
        sentences.append(
            f"{failed} responses are omitted, because the environment or reward failed on them. Metrics at k omit "
            "problems with fewer than k other responses."
        )
    return " ".join(sentences)


def table_columns(names: Iterable[str], table: str) -> dict[str, EvaluationMetric]:
    """Selects the metrics that a table shows.

    Args:
      names: Names of all computed metrics.
      table: Command that shows the table: "evaluate" or "report".

    Returns:
      Entries of the shown metrics by name, see `describe`.
    """
    entries = {name: describe(name) for name in names}
    largest = dict(sorted(map(split, entries), key=lambda name: name[1] or 0))
    return {
        name: entry
        for name, entry in entries.items()
        if table in entry.tables and (split(name) in largest.items() or (entry.every_k and split(name)[1] == 1))
    }
