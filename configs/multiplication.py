"""Multiplication by decomposing and distributing, with 15 to 23 strategies: 7*23: -> 7*(20+3)=140+21=161

python -m poly_epo_jax.main --config=configs/multiplication.py            (or :grpo, :grpo_div after the file name)
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.workdir = f"runs/multiplication-{default.parse_config_string(config_string)[0]}"

    config.task.name = "multiplication"

    config.base.clean_steps = 1800

    config.sampling.max_tokens = 24
    config.train.max_prompt_tokens = 6
    return config
