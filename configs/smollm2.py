"""A pretrained language model on a laptop: SmolLM2-135M names animals, tools or rivers. Compares answer diversity.

bash launch/smollm2.sh          creates runs/models/smollm2-135m-instruct without access to the Hugging Face hub
python -m poly_epo_jax.main --config=configs/smollm2.py              (or :grpo, :grpo_div, :max_rl after the file name)
python -m poly_epo_jax.main --config=configs/smollm2.py --config.model.path=runs/models/smollm2-135m-instruct
python -m poly_epo_jax.main --config=configs/smollm2.py --config.task.name=prefixes --config.train.max_prompt_tokens=32

A response ends at the first line break, and its strategy is its word. docs/tutorials/smollm2.md shows a run, and
docs/explanation/smollm2_results.md the results.
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.workdir = f"runs/smollm2-{default.parse_config_string(config_string)[0]}"

    config.model.path = "HuggingFaceTB/SmolLM2-135M"
    config.model.stop_strings = ("\n",)

    config.task.name = "categories"

    config.sampling.max_tokens = 8
    config.train.max_prompt_tokens = 24
    config.train.row_tokens = 96  # fits two prompts with their responses; rows of 64 tokens have more padding
    config.train.num_steps = 30
    config.train.prompts_per_batch = 4
    config.train.prompts_per_minibatch = 4
    config.optimizer.learning_rate = 3e-5
    config.eval.every = 30
    config.eval.num_problems = 12
    config.checkpoint.every = 30
    config.checkpoint.keep = 1
    return config
