"""Tests batches of problems: each problem occurs once per epoch, and the position can be saved and restored."""

import itertools
import json

import pytest

from poly_epo_jax.rollouts.prompts import problem_batches
from poly_epo_jax.types import Problem

PROBLEMS = [Problem(id=str(i), prompt=f"{i}:", answer=str(i)) for i in range(10)]


def drawn(batches, count: int) -> list[list[str]]:
    return [[problem.id for problem in batch] for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 7, 10])
def test_every_epoch_contains_every_problem_once(batch_size: int):
    """Includes epochs that end within a batch."""
    batches = drawn(problem_batches(PROBLEMS, batch_size, seed=0), 3 * len(PROBLEMS))
    assert all(len(batch) == batch_size for batch in batches)
    order = list(itertools.chain(*batches))[: 3 * len(PROBLEMS)]
    epochs = [order[start : start + len(PROBLEMS)] for start in range(0, len(order), len(PROBLEMS))]
    every = sorted(problem.id for problem in PROBLEMS)
    assert [sorted(epoch) for epoch in epochs] == [every] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_batches_contain_the_original_problem_objects():
    batch = next(problem_batches(PROBLEMS, 4, seed=0))
    assert isinstance(batch, list)
    assert all(problem is PROBLEMS[int(problem.id)] for problem in batch)


def test_repeated_problems_in_a_batch_differ_in_occurrence():
    batches = list(itertools.islice(problem_batches(PROBLEMS, 7, seed=0), 40))
    counted = [[(problem.id, problem.occurrence) for problem in batch] for batch in batches]
    assert all(len(set(batch)) == 7 for batch in counted)
    assert any((name, 1) in batch for batch in counted for name, _ in batch)
    assert all(batch.index((name, 0)) < batch.index((name, 1)) for batch in counted for name, time in batch if time)
    assert all(problem == PROBLEMS[int(problem.id)] for batch in batches for problem in batch)


def test_the_order_depends_on_the_seed():
    first, again, other = (drawn(problem_batches(PROBLEMS, 5, seed), 4) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("seen", [0, 1, 3, 4, 11])
def test_a_saved_position_is_restored_exactly(seen: int):
    """The position is serialized as JSON, as in a checkpoint."""
    batches = problem_batches(PROBLEMS, 3, seed=1)
    drawn(batches, seen)
    state = json.loads(json.dumps(batches.get_state()))
    rest = drawn(batches, 8)

    resumed = problem_batches(PROBLEMS, 3, seed=1)
    drawn(resumed, 5)
    resumed.set_state(state)
    assert drawn(resumed, 8) == rest


def test_too_few_problems_raise_an_error():
    with pytest.raises(ValueError, match=r"train.prompts_per_batch=11, but there are only 10"):
        problem_batches(PROBLEMS, 11, seed=0)
