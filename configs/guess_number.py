"""Guess the number on a laptop, an environment with replies: 20-59 -> 38 > 52 < 45

python -m poly_epo_jax.main --config=configs/guess_number.py         (or :grpo, :grpo_div, :max_rl after the file name)
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.workdir = f"runs/guess_number-{default.parse_config_string(config_string)[0]}"

    config.task.name = "guess_number"

    # The base policy prefers to begin in the middle, and guesses at random among the remaining numbers.
    config.base.clean_steps = 1000
    config.base.noisy_steps = 100
    config.base.skew = 0.5

    config.sampling.max_tokens = 15  # four guesses and three replies
    config.train.prompts_per_batch = 32
    config.optimizer.learning_rate = 1e-3
    config.eval.every = 50
    return config
