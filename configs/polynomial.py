"""Polynomial solving on a laptop: find any (x, y) with y = p(x). GRPO converges to one x, Poly-EPO keeps many.

python -m poly_epo_jax.main --config=configs/polynomial.py            (or :grpo, :grpo_div after the file name)
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.workdir = f"runs/polynomial-{default.parse_config_string(config_string)[0]}"
    return config
