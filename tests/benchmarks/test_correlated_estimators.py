"""Tests of benchmarks/correlated.py against brute force and known expectations."""

import itertools
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
P, REWARDS, N = np.array([0.5, 0.3, 0.2]), np.array([1, 0, 1], np.float32), 5


@pytest.fixture
def correlated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "correlated", raising=False)
    import correlated  # pyright: ignore[reportMissingImports]

    return correlated


def test_counts_are_those_of_all_groups(correlated: ModuleType):
    counts, weights = correlated.independent_counts(P, N)
    groups = np.array(list(itertools.product(range(3), repeat=N)))
    for row, weight in zip(counts, weights, strict=True):
        matching = ((groups[:, :, None] == np.arange(3)).sum(axis=1) == row).all(axis=1)
        np.testing.assert_allclose(P[groups[matching]].prod(axis=1).sum(), weight)
    counts, weights = correlated.lattice_counts(P, N)
    shifts = (np.arange(10_000) + 0.5) / 10_000
    points = (np.arange(N) + shifts[:, None]) / N
    found = (np.searchsorted(np.cumsum(P)[:-1], points, "right")[..., None] == np.arange(3)).sum(axis=1)
    fractions = [(found == row).all(axis=1).mean() for row in counts]
    np.testing.assert_allclose(fractions, weights, atol=1e-3)
    np.testing.assert_allclose(weights @ counts, N * P)


def test_bias_follows_from_the_covariance_of_reward_and_score(correlated: ModuleType):
    gradient = P * (REWARDS - P @ REWARDS)
    methods = correlated.methods(REWARDS)
    independent, _ = correlated.moments(P, *correlated.independent_counts(P, N), methods["leave-one-out"])
    np.testing.assert_allclose(independent, gradient, atol=1e-7)
    counts, weights = correlated.lattice_counts(P, N)
    mean, _ = correlated.moments(P, counts, weights, methods["GRPO"])
    covariance = (weights * (counts / N @ REWARDS - P @ REWARDS)) @ (counts / N - P)
    np.testing.assert_allclose(mean, gradient - covariance, atol=1e-7)
