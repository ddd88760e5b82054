"""Generations with a given text and placeholder tokens."""

from poly_epo_jax.types import Generation


def response(text: str, weight_version: int = 0) -> Generation:
    """Returns a generation with the single turn `text`."""
    return Generation.from_turns(text, version=weight_version)
