"""Automatic row lengths and microbatch sizes."""

from typing import Any

import pytest

from poly_epo_jax.config import default
from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.section import read_section
from poly_epo_jax.step.packing import make_pack, microbatch_rows, row_tokens, rows_per_device

ONE = {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1}
FOUR = {"data": 2, "fsdp": 2, "tensor": 1, "expert": 1}


def config(**changes: Any) -> Config:
    made = default.get_config()
    made.update_from_flattened_dict({f"train.{name}": value for name, value in changes.items()})
    return read_section(Config, made.to_dict())


@pytest.mark.parametrize(
    ("changes", "mesh", "length", "rows"),
    [
        ({}, ONE, 48, 16),  # two sequences of 24 tokens per row, and 1/8 of 256 / 2 rows
        ({}, FOUR, 48, 5),  # 1/8 would be 4 rows with fewer than 256 tokens
        ({"prompts_per_minibatch": 1}, ONE, 48, 4),  # all rows that can be filled
        ({"prompts_per_minibatch": 1}, FOUR, 48, 1),
        ({"prompts_per_minibatch": 2048}, ONE, 48, 85),  # at most 4,096 tokens
        ({"row_tokens": 5000}, ONE, 5000, 1),
        ({"row_tokens": 24, "rows_per_device": 7}, FOUR, 24, 7),
    ],
)
def test_rows_equal_hand_computed_values(changes: dict[str, int], mesh: dict[str, int], length: int, rows: int):
    made = config(**changes)
    assert (row_tokens(made), rows_per_device(made, mesh)) == (length, rows)
    assert microbatch_rows(made, mesh) == rows * mesh["data"] * mesh["fsdp"]
    assert make_pack(made, mesh)([]) == []
