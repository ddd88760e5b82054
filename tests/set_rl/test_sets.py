"""Tests of enumerated and sampled sets."""

import functools
import inspect
import itertools
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import poly_epo_jax
from poly_epo_jax.set_rl import enumerate_sets, sample_sets, sets


@pytest.mark.parametrize("num_generations", range(2, 9))
def test_all_sets_are_enumerated_in_lexicographic_order(num_generations):
    for set_size in range(1, num_generations):
        table = enumerate_sets(num_generations, set_size)
        assert table.dtype == np.int32
        assert table.tolist() == [list(rows) for rows in itertools.combinations(range(num_generations), set_size)]


def test_the_shared_table_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        enumerate_sets(4, 2)[0, 0] = 3


@pytest.mark.parametrize(
    ("num_generations", "set_size", "num_sets"),
    [
        (6, 3, 7),
        (6, 3, 20),  # all sets
        (64, 8, 500),  # C(64, 8) = 4.4e9 exceeds 32 bits
        (20, 10, 60_000),  # C(20, 10) = 184,756: a third of the first draws repeat an earlier set
        (20, 10, 184_756),  # all sets of a large table
        (256, 16, 1),
    ],
)
def test_sampled_sets_are_distinct_ascending_and_in_range(num_generations, set_size, num_sets):
    @jax.jit
    def draw(key):
        return sample_sets(key, num_generations, set_size, num_sets)

    drawn = np.asarray(draw(jax.random.key(0)))
    assert drawn.shape == (num_sets, set_size) and drawn.dtype == np.int32
    assert len(np.unique(drawn, axis=0)) == num_sets
    assert (np.diff(drawn, axis=1) > 0).all()
    assert drawn.min() >= 0 and drawn.max() < num_generations


def test_sampling_the_number_of_all_sets_returns_all_sets():
    drawn = np.asarray(sample_sets(jax.random.key(3), 7, 3, 35))
    np.testing.assert_array_equal(np.unique(drawn, axis=0), enumerate_sets(7, 3))


def test_samples_depend_on_the_key_only():
    first, again, other = (sample_sets(jax.random.key(seed), 64, 8, 50) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (np.asarray(first) != np.asarray(other)).any()


@pytest.mark.parametrize("small_table", [2**16, 0], ids=["from the table", "by redrawing"])
def test_all_choices_of_sets_are_equally_likely(monkeypatch, small_table):
    monkeypatch.setattr(sets, "_SMALL_TABLE", small_table)
    num_generations, set_size, num_sets, num_draws = 5, 2, 4, 40_000
    draw = functools.partial(
        inspect.unwrap(sample_sets), num_generations=num_generations, set_size=set_size, num_sets=num_sets
    )
    drawn = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), num_draws)))

    set_ids = (2**drawn).sum(axis=-1)  # a set as a bit mask
    choices, counts = np.unique(np.sort(set_ids, axis=1), axis=0, return_counts=True)
    num_choices = math.comb(math.comb(num_generations, set_size), num_sets)
    assert len(choices) == num_choices == 210
    expected = num_draws / num_choices
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = num_choices - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_generations_are_sampled_equally_often():
    num_generations, set_size, num_sets = 64, 8, 20_000
    drawn = np.asarray(sample_sets(jax.random.key(1), num_generations, set_size, num_sets))
    fraction = set_size / num_generations
    standard_error = math.sqrt(num_sets * fraction * (1 - fraction))
    counts = np.bincount(drawn.ravel(), minlength=num_generations)
    assert np.abs(counts - num_sets * fraction).max() < 4.5 * standard_error


@pytest.mark.parametrize("set_size", [0, -1])
def test_empty_sets_are_rejected(set_size):
    with pytest.raises(ValueError, match=f"set_size={set_size} must be at least 1"):
        enumerate_sets(4, set_size)


@pytest.mark.parametrize("construct", [enumerate_sets, lambda N, n: sample_sets(jax.random.key(0), N, n, 1)])
def test_sets_as_large_as_the_group_are_rejected(construct):
    with pytest.raises(ValueError, match="num_generations=4 must exceed set_size=4"):
        construct(4, 4)


@pytest.mark.parametrize("num_sets", [0, 71])
def test_an_invalid_number_of_sets_is_rejected(num_sets):
    with pytest.raises(ValueError, match=rf"num_sets={num_sets} .*C\(8, 4\) = 70"):
        sample_sets(jax.random.key(0), 8, 4, num_sets)


def test_set_rl_imports_only_jax_and_numpy():
    """set_rl imports no model, optimizer or tokenizer library. Of the package, it only imports the lowest layer."""
    code = "import sys, poly_epo_jax.set_rl; print(*sys.modules)"
    root = Path(poly_epo_jax.__file__).parents[1]
    imported = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert not {"flax", "optax", "transformers", "torch", "orbax"} & set(imported.split())
    ours = {name for name in imported.split() if name.startswith("poly_epo_jax.")}
    assert {name for name in ours if not name.startswith("poly_epo_jax.set_rl")} == {
        "poly_epo_jax.types",
        "poly_epo_jax.registry",
    }
