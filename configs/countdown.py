"""Countdown on a laptop: reach a target with four numbers, each used once: 2,3,5,7=16 -> 5*7-3/2

python -m poly_epo_jax.main --config=configs/countdown.py            (or :grpo, :grpo_div, :max_rl after the file name)

GRPO's pass@k starts higher than the base policy's and falls below it. Poly-EPO's is above GRPO's from k = 4.
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.workdir = f"runs/countdown-{default.parse_config_string(config_string)[0]}"

    config.task.name = "countdown"

    # The base policy prefers cheap operators and has seen few problems that require others.
    config.base.clean_steps = 1000
    config.base.noisy_steps = 100
    config.base.skew = 0.5

    config.sampling.max_tokens = 9
    config.train.num_steps = 300
    config.train.prompts_per_batch = 32
    config.optimizer.learning_rate = 1.5e-4
    config.eval.every = 50
    return config
