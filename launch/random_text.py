"""Configuration of training steps with random weights, so that whole steps can be measured without a download.

python launch/random_text.py FOLDER Qwen3-0.6B [NAME=SIZE ...]      writes a model folder with random weights
python -m poly_epo_jax.main --config=launch/random_text.py:grpo --config.model.path=FOLDER

The tokenizer has one word per token. Responses of random weights do not end before `sampling.max_tokens`. Every fourth
response, by its checksum, is correct, so that groups have advantages.
"""

import dataclasses
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from poly_epo_jax.config import default
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Generation, Problem

PROMPT_WORDS = 64


class RandomTextTask:
    """Task whose prompts are random words, and whose rewards do not depend on the meaning of responses."""

    def __init__(self):
        texts = [" ".join(f"w{2 + (i * 67 + j * 31) % 509}" for j in range(PROMPT_WORDS)) for i in range(257)]
        problems = [Problem(f"random/{i}", text, "") for i, text in enumerate(texts)]
        self.train_problems: Sequence[Problem] = problems[1:]
        self.held_out_problems: Sequence[Problem] = problems[:1]

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns 1 for about a quarter of all texts, otherwise 0."""
        return float(zlib.crc32(generation.text.encode()) % 4 == 0)


TASKS["random_text"] = RandomTextTask


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.model.dtype = "bfloat16"
    config.model.remat = "auto"
    config.model.scan_unroll = 1
    config.task.name = "random_text"
    config.judge.name = "ngrams"
    config.rollouts.max_concurrent = 256
    config.sampling.max_tokens = 512
    config.train.max_prompt_tokens = PROMPT_WORDS
    config.train.num_steps = 2  # the first step includes compilation
    config.train.prompts_per_batch = 32
    config.train.row_tokens = 4096
    config.optimizer.learning_rate = 1e-6
    config.eval.every = 0
    return config


def write_model(folder: Path, preset: str, **sizes: int) -> None:
    """Writes a model folder with random weights and a tokenizer of words.

    Args:
      folder: Folder to create.
      preset: Name of an architecture in model/presets.py.
      **sizes: Fields of the model configuration with other values.
    """
    import jax
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from poly_epo_jax.model.hf import save_pretrained
    from poly_epo_jax.model.presets import preset_config
    from poly_epo_jax.model.transformer import init_params

    model_config = dataclasses.replace(preset_config(preset), **sizes)
    names = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, model_config.vocab_size))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    params = jax.jit(lambda: init_params(model_config))()
    save_pretrained(folder, params, model_config, eos_token_id=1, pad_token_id=0, tokenizer=tokenizer)


if __name__ == "__main__":
    target, name, *changes = sys.argv[1:]
    write_model(Path(target), name, **{key: int(value) for key, value in (change.split("=") for change in changes)})
