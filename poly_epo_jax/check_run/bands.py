"""Bands of the curves of recipes, from runs with several seeds. Does not import JAX.

Each file in check_run/bands/ contains the values of one recipe and method, which benchmarks/bands.py measured:

    {"config": {...}, "versions": {...}, "seeds": [0, 1, ...], "values": {"eval/reward": {"20": [0.91, ...], ...}, ...}}

A band is Student's prediction interval for the value of one further seed. Its level is 1 - `ERROR` / C for C values, so
that a run of the recipe is outside any of its C bands with a probability of at most `ERROR`, if the values of a metric
at a step are normally distributed over seeds. The correlation of the values does not matter (Bonferroni).
"""

import dataclasses
import importlib.resources
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from poly_epo_jax.config.section import flat
from poly_epo_jax.metrics.intervals import prediction_interval
from poly_epo_jax.metrics.logged import describe, is_held_out
from poly_epo_jax.system.json_files import Row

ERROR = 0.01
"""Maximum probability that a run of the recipe has a value outside its bands."""

METRICS = {
    "eval/reward": 0.002,
    "eval/correct_clusters@8": 0.02,
    "eval/pass@8": 0.005,
    "policy/entropy": 0.002,
    "response/truncated": 0.002,
}
"""Compared metrics, with the smallest standard deviation over seeds that a band assumes.

Near 0 and 1, values of few seeds can be nearly equal by chance. A larger deviation makes a band wider.
"""

IGNORED_KEYS = (
    "seed",
    "train.rows_per_device",
    "train.profile_steps",
    "mesh.",
    "hosts.",
    "checkpoint.",
    "log.",
    "audit.",
)
"""Keys, and prefixes of keys, that may differ from the recipe, in addition to the folders that `flat` omits."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A value of a run and its band.

    Attributes:
      metric: Name of the metric.
      step: Step of the evaluation. Metrics of updates are means over the steps since the previous evaluation.
      value: Value of the run, or None if the run did not log the metric.
      low: Lower bound of the band.
      high: Upper bound of the band.
    """

    metric: str
    step: int
    value: float | None
    low: float
    high: float

    @property
    def is_inside(self) -> bool:
        """True if the value is in the band. False if it is missing."""
        return self.value is not None and self.low <= self.value <= self.high

    def cells(self) -> list[str]:
        """Returns step, title, value, band and verdict as texts."""
        value = "not logged" if self.value is None else f"{self.value:.4f}"
        return [
            str(self.step),
            describe(self.metric).title,
            value,
            f"{self.low:.4f} to {self.high:.4f}",
            "inside" if self.is_inside else "OUTSIDE",
        ]


@dataclasses.dataclass(frozen=True)
class Bands:
    """The values of runs of a recipe that differ only in their seeds.

    Attributes:
      config: Configuration of the first run.
      versions: Software versions of the runs.
      seeds: Seeds of the runs.
      values: One value per seed, by metric and step of an evaluation.
    """

    config: Mapping[str, Any]
    versions: Mapping[str, str]
    seeds: Sequence[int]
    values: Mapping[str, Mapping[str, Sequence[float]]]

    def compare(self, rows: Sequence[Row]) -> list[Comparison]:
        """Compares a run with the bands.

        Args:
          rows: Rows of metrics.jsonl.

        Returns:
          A comparison for each metric and step that the run has reached. Empty if the run is too short.
        """
        steps = [int(step) for step in next(iter(self.values.values()))]
        error, found = ERROR / (len(self.values) * len(steps)), values_at(rows, steps)
        return [
            Comparison(metric, step, found[metric, step], low, high)
            for step in steps
            for metric, by_step in self.values.items()
            if (metric, step) in found
            for low, high in [prediction_interval(np.array(by_step[str(step)]), 1 - error, METRICS[metric])]
        ]


def values_at(rows: Sequence[Row], steps: Sequence[int]) -> dict[tuple[str, int], float | None]:
    """Returns the values of `METRICS` by metric and step, until the last logged evaluation. Missing values are None.

    Args:
      rows: Rows of metrics.jsonl.
      steps: Steps of evaluations, in ascending order.
    """
    last = max((row["step"] for row in rows if any(map(is_held_out, row))), default=0)
    found: dict[tuple[str, int], float | None] = {}
    for previous, step in zip([0, *steps], steps, strict=False):
        for metric in METRICS if step <= last else ():
            first = step if is_held_out(metric) else previous + 1
            logged = (row[metric] for row in rows if metric in row and first <= row["step"] <= step)
            values = [value for value in logged if isinstance(value, int | float)]
            found[metric, step] = statistics.fmean(values) if values else None
    return found


def differing_keys(config: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compares two configurations, without `IGNORED_KEYS`.

    Args:
      config: Configuration of a run.
      expected: Configuration of a recipe.

    Returns:
      Both values, by the dotted name of each key in which they differ. A missing value is None.
    """
    found, wanted = flat(config), flat(expected)
    values = {key: (found.get(key), wanted.get(key)) for key in sorted(found.keys() | wanted.keys())}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1] and not key.startswith(IGNORED_KEYS)}


def find_bands(config: Mapping[str, Any]) -> Bands | None:
    """Returns the bands of the task and method of a configuration, or None if there are none yet."""
    for file in importlib.resources.files("poly_epo_jax.check_run").joinpath("bands").iterdir():
        bands = Bands(**json.loads(file.read_text(encoding="utf-8")))
        if all(bands.config[section] == config.get(section) for section in ("task", "algo")):
            return bands
    return None


def summary(bands: Bands | None, compared: Sequence[Comparison]) -> str:
    """Returns the result of a check as a sentence: inside, outside, too short, or no bands yet."""
    if bands is None:
        return "no bands yet for this recipe."
    if not compared:
        first = next(iter(next(iter(bands.values.values()))))
        return f"too short for the bands, which begin at the evaluation after step {first}."
    outside = sum(not one.is_inside for one in compared)
    return (
        f"{f'OUTSIDE the bands in {outside}' if outside else 'inside the bands in all'} of {len(compared)} values up "
        f"to step {compared[-1].step} (bands of {len(bands.seeds)} seeds; a run of the recipe is outside with a "
        f"probability of at most {ERROR:.0%})."
    )
