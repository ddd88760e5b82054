"""Methods that can be selected by name, after the name of the configuration file: --config=configs/polaris.py:grpo"""

METHODS = {
    "poly_epo": {"advantages": "marginal_set", "length_normalization": "max"},
    "grpo": {"advantages": "grpo", "length_normalization": "own"},
    "grpo_div": {"advantages": "grpo_div", "length_normalization": "own"},
}
"""Keys of the `algo` section for each of the paper's three methods (appendix "Implementation Details").

With length_normalization="max", the token losses of every response are divided by sampling.max_tokens. With "own", they
are divided by the number of tokens of the response.
"""

METHOD_PRESETS = {**METHODS, "max_rl": {"advantages": "max_rl", "length_normalization": "own"}}
"""Methods that can be selected by name: the methods of the paper, and a baseline of the studies."""
