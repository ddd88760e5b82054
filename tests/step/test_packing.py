"""Packing: every token of every sequence occurs once, at the position that the model and the loss expect."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from fakes import random_sequences
from packings import visible_where_shared

from poly_epo_jax.step.packing import TrainingSequence, pack

FIELDS = ("tokens", "positions", "targets", "weights", "advantages", "sampler_logprobs")


def of_lengths(*lengths):
    """Creates sequences of these lengths with distinct tokens. The second half of each is its response."""
    ids = iter(range(10_000))
    sequences = []
    for length in lengths:
        tokens = np.array([next(ids) for _ in range(length)], np.int32)
        prompt, response = tokens[: length // 2], tokens[length // 2 :]
        sequences.append(
            TrainingSequence(prompt, response, np.full(len(response), -0.5, np.float32), response >= 0, 2.0, 0.25)
        )
    return sequences


def expected_columns(sequence):
    """Returns the expected entries of FIELDS at each position of a sequence."""
    ids = [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]
    columns = []
    for t, token in enumerate(ids):
        response_index = t + 1 - len(sequence.prompt_ids)  # index of the target of position t
        if t + 1 == len(ids):
            columns.append((token, t, 0, 0.0, 0.0, 0.0))
        elif response_index < 0:
            columns.append((token, t, ids[t + 1], 0.0, 0.0, 0.0))
        else:
            logprob = sequence.sampler_logprobs[response_index]
            columns.append((token, t, ids[t + 1], sequence.weight, sequence.advantage, logprob))
    return tuple((*column[:3], *map(np.float32, column[3:])) for column in columns)


def found_columns(batch, r, segment):
    where = np.flatnonzero(batch.segment_ids[r] == segment)
    np.testing.assert_array_equal(where, where[0] + np.arange(len(where)))
    return tuple(zip(*(getattr(batch, name)[r, where].tolist() for name in FIELDS), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_every_token_occurs_once_at_its_position(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, int(rng.integers(1, 60)), max_prompt=9, max_response=20, vocab=1000)
    row_tokens, num_rows = int(rng.integers(29, 70)), int(rng.integers(1, 6))
    found, num_rows_used = [], 0
    for batch in pack(sequences, row_tokens, num_rows):
        assert {getattr(batch, name).shape for name in (*FIELDS, "segment_ids")} == {(num_rows, row_tokens)}
        padding = batch.segment_ids == 0
        for name in FIELDS:
            assert not getattr(batch, name)[padding].any()
        assert not batch.old_logprobs.any() and not batch.reference_logprobs.any() and bool(batch.on_policy)
        for r in range(num_rows):
            segments = batch.segment_ids[r].max()
            assert sorted(set(batch.segment_ids[r].tolist()) - {0}) == list(range(1, segments + 1))
            found += [found_columns(batch, r, segment) for segment in range(1, segments + 1)]
            num_rows_used += segments > 0
    assert sorted(found) == sorted(expected_columns(sequence) for sequence in sequences)
    assert len(pack(sequences, row_tokens, num_rows)) == math.ceil(num_rows_used / num_rows)


def test_packed_rows_equal_a_hand_computed_example():
    a = TrainingSequence(
        np.array([5, 6]), np.array([7, 8, 9]), np.array([-0.1, -0.2, -0.3], np.float32), np.ones(3, bool), 2.0, 0.25
    )
    b = TrainingSequence(np.array([3]), np.array([4]), np.array([-0.4], np.float32), np.ones(1, bool), -1.0, 0.5)
    (batch,) = pack([b, a], row_tokens=8, rows_per_microbatch=2)
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 8, 9, 3, 4, 0], [0] * 8])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 0, 1, 0], [0] * 8])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 1, 1, 2, 2, 0], [0] * 8])
    np.testing.assert_array_equal(batch.targets, [[6, 7, 8, 9, 0, 4, 0, 0], [0] * 8])
    np.testing.assert_array_equal(batch.weights, [[0, 0.25, 0.25, 0.25, 0, 0.5, 0, 0], [0] * 8])
    np.testing.assert_array_equal(batch.advantages, [[0, 2, 2, 2, 0, -1, 0, 0], [0] * 8])
    expected = np.array([[0, -0.1, -0.2, -0.3, 0, -0.4, 0, 0], [0] * 8], np.float32)
    np.testing.assert_array_equal(batch.sampler_logprobs, expected)


def test_the_longest_sequences_are_placed_first_in_the_first_row_with_space():
    (batch,) = pack(of_lengths(3, 4, 6, 7), row_tokens=10, rows_per_microbatch=2)  # the given order would need 3 rows
    np.testing.assert_array_equal(batch.segment_ids, [[1] * 7 + [2] * 3, [1] * 6 + [2] * 4])


@pytest.mark.parametrize("seed", range(5))
def test_number_of_rows_is_near_the_minimum(seed):
    """First-fit decreasing takes at most 11/9 of the minimum number of rows, plus 6/9 (Dosa, 2007)."""
    rng = np.random.default_rng(seed)
    row_tokens, min_rows = 100, 40
    cuts = [np.sort(rng.choice(np.arange(2, 99, 2), rng.integers(1, 5), replace=False)) for _ in range(min_rows)]
    lengths = [length for cut in cuts for length in np.diff([0, *cut, row_tokens]).tolist()]  # these fill 40 rows
    batches = pack(of_lengths(*rng.permutation(lengths).tolist()), row_tokens, rows_per_microbatch=1)
    assert min_rows <= len(batches) <= 11 / 9 * min_rows + 6 / 9


def test_a_sequence_may_fill_a_row_but_not_exceed_it():
    (batch,) = pack(of_lengths(12), row_tokens=12, rows_per_microbatch=1)
    np.testing.assert_array_equal(batch.tokens, [np.arange(12)])
    with pytest.raises(ValueError, match=r"13 tokens.* train\.row_tokens=12; raise it"):
        pack(of_lengths(5, 13, 2), row_tokens=12, rows_per_microbatch=4)


def test_no_sequences_give_no_batches():
    assert pack([], row_tokens=12, rows_per_microbatch=4) == []


def test_tokens_that_the_policy_did_not_generate_have_weight_zero():
    """A reply of two tokens between tokens of the policy is an input but not a target."""
    mask = np.array([True, False, False, True])
    sequence = TrainingSequence(np.array([5]), np.array([1, 2, 3, 4]), np.full(4, -0.5, np.float32), mask, 2.0, 0.25)
    (batch,) = pack([sequence], row_tokens=6, rows_per_microbatch=1)
    np.testing.assert_array_equal(batch.tokens, [[5, 1, 2, 3, 4, 0]])
    np.testing.assert_array_equal(batch.weights, [[0.25, 0, 0, 0.25, 0, 0]])


def families(rng, num_prompts, num_generations, max_prompt=9):
    """Creates random sequences. Sequences of the same prompt share its array."""
    found = []
    for _ in range(num_prompts):
        prompt = rng.integers(0, 1000, rng.integers(1, max_prompt + 1)).astype(np.int32)
        drawn = random_sequences(rng, num_generations, vocab=1000)
        found += [dataclasses.replace(sequence, prompt_ids=prompt) for sequence in drawn]
    return found


def predictions(batches):
    """Returns, for each trained token, the ordered tokens that it attends to, the token, and the inputs of the loss."""
    found = []
    for batch in batches:
        seen = visible_where_shared(batch.segment_ids, batch.positions)
        for r, t in np.argwhere(batch.weights > 0):
            context = sorted(zip(batch.positions[r, seen[r, t]], batch.tokens[r, seen[r, t]], strict=True))
            assert [position for position, _ in context] == list(range(len(context)))
            columns = (getattr(batch, name)[r, t].item() for name in FIELDS[2:])
            found.append((*(int(token) for _, token in context), *columns))
    return sorted(found)


@pytest.mark.parametrize("seed", range(8))
def test_shared_prompts_do_not_change_the_context_of_any_token(seed):
    rng = np.random.default_rng(seed)
    sequences = families(rng, int(rng.integers(1, 9)), int(rng.integers(1, 7)))
    alone = predictions(pack(sequences, 24, rows_per_microbatch=4))
    for row_tokens, num_rows in itertools.product((24, 50, 300), (1, 3)):
        shared = pack(sequences, row_tokens, num_rows, share_prompts=True)
        assert predictions(shared) == alone


def test_a_shared_prompt_is_stored_once_per_row():
    prompt = np.array([5, 6, 7], np.int32)
    a, b = (
        TrainingSequence(prompt, np.array(ids), np.full(len(ids), -0.5, np.float32), np.ones(len(ids), bool), 2.0, 0.25)
        for ids in ([1, 2], [3, 4, 5])
    )
    (batch,) = pack([a, b], row_tokens=8, rows_per_microbatch=1, share_prompts=True)
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 3, 4, 7, 1, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 2, 3, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 2, 2, 2, 3, 3, 0]])
    np.testing.assert_array_equal(batch.targets, [[0, 0, 3, 4, 5, 1, 2, 0]])
    np.testing.assert_array_equal(batch.weights > 0, [[0, 0, 1, 1, 1, 1, 1, 0]])
