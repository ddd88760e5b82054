"""The synthetic domains of the paper on Qwen3-1.7B-Base: polynomials or multiplication, posed in prose.

python -m poly_epo_jax.main --config=configs/prose.py                (or :grpo, :grpo_div, :h200x2 after the file name)
python -m poly_epo_jax.main --config=configs/prose.py --config.task.name=multiplication_prose

Clusters are exact strategies: the point on the curve, or the decomposition of the operands. The paper uses
Gemini-2.0-Flash to cluster multiplications instead; docs/reference/recipes.md lists the flags for an LLM judge. The
paper does not specify the other hyperparameters of these runs, so they are our choice.
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.workdir = f"runs/prose-{default.parse_config_string(config_string)[0]}"

    config.model.path = "Qwen/Qwen3-1.7B-Base"
    config.model.stop_strings = ("<|im_end|>", "<|endoftext|>")
    config.model.dtype = "bfloat16"
    config.model.remat = "auto"

    config.task.name = "polynomial_prose"

    config.rollouts.name = "sglang"
    config.rollouts.urls = "http://127.0.0.1:30000"
    config.rollouts.max_concurrent = 256

    config.sampling.max_tokens = 512
    config.train.max_prompt_tokens = 128
    config.train.num_steps = 100
    config.train.row_tokens = 8192
    config.train.rows_per_device = 1
    config.optimizer.learning_rate = 1e-6
    config.optimizer.schedule = "constant"
    config.optimizer.end_lr_fraction = 0.0

    config.eval.num_problems = 50
    config.checkpoint.every = 20
    return config
