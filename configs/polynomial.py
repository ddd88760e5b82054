"""Polynomial solving on a laptop: find any (x, y) with y = p(x), where GRPO settles on one x and Poly-EPO keeps many.

python -m poly_epo_jax.main --config=configs/polynomial.py            (or :grpo, :grpo_div after the file name)
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default


def get_config(words: str = "poly_epo") -> ConfigDict:
    config = default.get_config(words)
    config.workdir = f"runs/polynomial-{default.parse_words(words)[0]}"
    return config
