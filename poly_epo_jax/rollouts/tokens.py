"""Between text and tokens, the same way for every sampler."""

from typing import Any

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.types import Problem


def encode_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem, max_prompt_tokens: int) -> Int[np.ndarray, "L"]:
    """The prompt's tokens; nothing is added to the text.

    Raises:
      ValueError: there are none, or more than `max_prompt_tokens`.
    """
    ids = np.asarray(tokenizer.encode(problem.prompt, add_special_tokens=False), np.int32)
    if not len(ids):
        raise ValueError(f"The prompt of problem {problem.id} is empty; leave the problem out.")
    if len(ids) > max_prompt_tokens:
        raise ValueError(
            f"The prompt of problem {problem.id} has {len(ids)} tokens, more than "
            f"train.max_prompt_tokens={max_prompt_tokens}; raise that, or leave the problem out."
        )
    return ids


def response_text(tokenizer: PreTrainedTokenizerBase, token_ids: Int[np.ndarray, "T"], stopped: bool) -> str:
    """What the policy wrote; where it `stopped`, its last token is the stop token and no part of the text."""
    ids: Any = token_ids[:-1] if stopped else token_ids
    return str(tokenizer.decode(ids))
