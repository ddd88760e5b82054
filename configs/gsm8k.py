"""Grade-school mathematics (GSM8K) on one GPU, with Qwen3-0.6B-Base or, with 80 GB of memory, Qwen3-1.7B-Base.

python -m poly_epo_jax.main --config=configs/gsm8k.py                       (or :grpo, :rtx4090x1, :1.7b,h100x1, ...)

Does not require servers: the trainer generates the responses, and responses with equal final answers form a cluster.
Problems are read from the Hugging Face hub, or from local files with the same columns:
--config.task.options.train=train.jsonl --config.task.options.held_out=test.jsonl
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default

MODELS = {"0.6b": "Qwen/Qwen3-0.6B-Base", "1.7b": "Qwen/Qwen3-1.7B-Base"}
"""Hub names of the models, by the name after the configuration file."""


def get_config(config_string: str = "0.6b") -> ConfigDict:
    """Returns the configuration. `config_string` names a model, a method and a machine, separated by commas."""
    config = default.get_config(config_string, model=MODELS)
    method, _, model = default.parse_config_string(config_string, model=MODELS)
    size = model or "0.6b"
    config.workdir = f"runs/gsm8k-{size}-{method}"

    config.model.path = MODELS[size]
    # The prompt is a chat turn. Base models may end their turn with either token.
    config.model.stop_strings = ("<|im_end|>", "<|endoftext|>")
    config.model.dtype = "bfloat16"
    config.model.remat = "auto"
    config.model.scan_unroll = 1

    config.task.name = "math"
    config.task.options.train = "openai/gsm8k:main:train"
    config.task.options.held_out = "openai/gsm8k:main:test"
    config.task.options.problem_column = "question"
    config.task.options.answer_marker = "####"

    config.judge.name = "answer"

    config.rollouts.max_concurrent = 48  # fits into 24 GB; increase it with more memory

    config.sampling.max_tokens = 512
    config.train.max_prompt_tokens = 256
    config.train.num_steps = 300
    config.train.prompts_per_batch = 32
    config.train.row_tokens = 4096
    config.train.rows_per_device = 1
    config.optimizer.learning_rate = 1e-6
    config.optimizer.schedule = "constant"
    config.optimizer.end_lr_fraction = 0.0

    config.eval.every = 50
    config.eval.num_problems = 64
    config.eval.num_generations = 8
    return config
