"""The main experiment of the paper: Qwen3-4B-Base on POLARIS-53K, with Qwen3-4B-Instruct as judge, on 4 x H200.

python -m poly_epo_jax.main --config=configs/polaris.py              (or :grpo, :grpo_div, :h200x8 after the file name)

Requires running servers for the policy and the judge. `bash launch/node.sh` starts them and this command on one node,
and documents the use of each GPU. 850 steps of 1,024 responses are two epochs. docs/explanation/paper_and_code.md lists
the configuration key of each hyperparameter in the paper's table.
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.workdir = f"runs/polaris-{default.parse_config_string(config_string)[0]}"

    config.model.path = "Qwen/Qwen3-4B-Base"
    # The prompt is a chat turn. Base models may end their turn with either token.
    config.model.stop_strings = ("<|im_end|>", "<|endoftext|>")
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.model.scan_unroll = 1

    config.task.name = "math"
    config.task.options.train = "POLARIS-Project/Polaris-Dataset-53K"

    config.judge.name = "llm"
    config.judge.url = "http://127.0.0.1:30010"  # Qwen/Qwen3-4B-Instruct-2507

    config.rollouts.name = "sglang"
    config.rollouts.urls = "http://127.0.0.1:30000,http://127.0.0.1:30001,http://127.0.0.1:30002"
    config.rollouts.max_concurrent = 352  # 128 x 8 responses on three servers, with some slack for imbalance

    config.sampling.max_tokens = 4096
    config.train.max_prompt_tokens = 1024
    config.train.num_steps = 850
    config.train.prompts_per_batch = 128
    config.train.prompts_per_minibatch = 64
    # A row of 16,384 tokens fits three sequences of the maximum length of 5,120 tokens, or more shorter ones.
    config.train.row_tokens = 16_384
    config.train.rows_per_device = 1
    config.optimizer.learning_rate = 1e-6
    config.optimizer.schedule = "constant"
    config.optimizer.end_lr_fraction = 0.0

    config.eval.every = 0  # set it together with task.options.held_out
    config.checkpoint.every = 25
    config.log.generations_every = 1
    return config
