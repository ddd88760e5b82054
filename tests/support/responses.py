"""Generations with a given text and placeholder tokens."""

import numpy as np

from poly_epo_jax.types import Generation


def response(text: str, weight_version: int = 0) -> Generation:
    """Returns a generation with the single turn `text`."""
    ids, versions = np.zeros(1, np.int32), np.full(1, weight_version, np.int32)
    return Generation(ids, np.zeros(1, np.float32), np.ones(1, bool), (text,), "stop", versions)
