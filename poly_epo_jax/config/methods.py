"""Methods that can be selected by name, after the name of the configuration file: --config=configs/polaris.py:grpo"""

from typing import Any

METHODS = {
    "poly_epo": {"advantages": "marginal_set", "length_normalization": "max"},
    "grpo": {"advantages": "grpo", "length_normalization": "own"},
    "grpo_div": {"advantages": "grpo_div", "length_normalization": "own"},
}
"""Keys of the `algo` section for each of the paper's three methods (appendix "Implementation Details").

With length_normalization="max", the token losses of every response are divided by sampling.max_tokens. With "own", they
are divided by the number of tokens of the response.
"""

METHOD_PRESETS: dict[str, dict[str, Any]] = {
    **METHODS,
    "max_rl": {"advantages": "max_rl", "length_normalization": "own"},
    "dapo": {"advantages": "grpo", "length_normalization": "token", "clip_high": 0.28, "truncated": "penalize"},
}
"""Methods that can be selected by name: the methods of the paper, a baseline of the studies, and DAPO.

dapo has the upper clip range, the mean over tokens and the overlong penalty of DAPO (arXiv 2503.14476), and also sets
`train.refill`, which is its dynamic sampling. It does not divide advantages by their standard deviation, as DAPO does.
"""
