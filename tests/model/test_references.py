"""Compares each model family with stored logits and gradients of transformers, see make_references.py."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import (
    FAMILIES,
    LENGTHS,
    REFERENCES,
    assert_same_gradients,
    make_config,
    packed_row,
    read_reference,
    summarize,
    write_model,
)
from test_hf import FLOAT32
from test_layer import build

from poly_epo_jax.model.architectures import ARCHITECTURES
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf import exported_tensors, load_params, read_model_config
from poly_epo_jax.types import Params


@functools.partial(jax.jit, static_argnums=0)
def logits_and_gradients(config: ModelConfig, params: Params, row: tuple[Any, ...]) -> tuple[jax.Array, Params]:
    """Returns the logits of a packed row without its padding, and the gradients of sum(sin(logits))."""

    def loss(params):
        model = build(config, params)
        logits = (model(*row)[0, : sum(LENGTHS)] @ model.head.T).astype(jnp.float32)
        return jnp.sin(logits).sum(), logits

    gradients, logits = jax.grad(loss, has_aux=True)(params)
    return logits, gradients


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_and_gradients_equal_the_stored_references(case: str, tmp_path: Path):
    expected = read_reference(case)
    write_model(tmp_path, case, expected.shapes)
    config = dataclasses.replace(read_model_config(tmp_path, **FLOAT32), remat="none")
    params = load_params(tmp_path, config)
    logits, gradients = logits_and_gradients(config, params, packed_row())
    assert expected.logits.std() > 0.3
    np.testing.assert_allclose(logits, expected.logits, atol=1e-4, rtol=0)
    tensors = dict(exported_tensors(jax.device_get(gradients), config, "float32"))
    assert tensors.keys() == expected.shapes.keys()
    assert_same_gradients(summarize(tensors), expected.gradients, expected.shapes)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_the_script_computes_the_stored_references(case: str):
    if not os.environ.get("POLY_EPO_REQUIRE_TORCH"):
        pytest.importorskip(
            "torch", reason="torch is not installed; run bash launch/test.sh, which installs it for CPUs"
        )
    from make_references import compute_reference

    found, stored = compute_reference(case), read_reference(case)
    assert found.shapes == stored.shapes
    np.testing.assert_allclose(found.logits, stored.logits, atol=1e-5, rtol=0)
    assert_same_gradients(found.gradients, stored.gradients, stored.shapes)


def test_every_family_has_a_reference():
    families = {make_config(case).model_type for case in FAMILIES}
    assert families == set(ARCHITECTURES)
    assert {file.stem for file in REFERENCES.iterdir()} == set(FAMILIES)
