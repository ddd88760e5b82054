"""A real language model on a laptop: SmolLM2-135M names animals, tools, rivers; which method ends with many of them?

bash launch/smollm2.sh          makes runs/models/smollm2-135m-instruct where the Hugging Face hub cannot be reached
python -m poly_epo_jax.main --config=configs/smollm2.py              (or :grpo, :grpo_div, :max_rl after the file name)
python -m poly_epo_jax.main --config=configs/smollm2.py --config.model.path=runs/models/smollm2-135m-instruct
python -m poly_epo_jax.main --config=configs/smollm2.py --config.task.name=prefixes --config.train.max_prompt_tokens=32

A response ends at the end of its line, and its strategy is the word that it says. docs/smollm2.md has the results.
"""

from ml_collections import ConfigDict

from poly_epo_jax.config import default


def get_config(words: str = "poly_epo") -> ConfigDict:
    config = default.get_config(words)
    config.workdir = f"runs/smollm2-{default.parse_words(words)[0]}"

    config.model.path = "HuggingFaceTB/SmolLM2-135M"
    config.model.stop_strings = ("\n",)

    config.task.name = "categories"

    config.sampling.max_tokens = 8
    config.train.max_prompt_tokens = 24
    config.train.row_tokens = 96  # two prompts with their responses fit, and leave less padding than in rows of 64
    config.train.num_steps = 30
    config.train.prompts_per_batch = 4
    config.train.prompts_per_minibatch = 4
    config.optimizer.learning_rate = 3e-5
    config.eval.every = 30
    config.eval.num_problems = 12
    config.checkpoint.every = 30
    config.checkpoint.keep = 1
    return config
