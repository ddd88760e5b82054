"""Prompts of problems: their tokens, which of them are too long, and the order in which batches take them."""

import collections
import dataclasses
from collections.abc import Sequence

import grain
import numpy as np
from grain import DatasetIterator
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.types import Problem


def encode_prompts(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[Int[np.ndarray, " L"]]:
    """The tokens of each prompt. Nothing is added to its text, except the tokenizer's chat template if it is a chat.

    Raises:
      ValueError: a prompt is a chat, and the tokenizer has no chat template.
    """
    if not problems:
        return []
    if any(problem.chat for problem in problems) and not tokenizer.chat_template:
        raise ValueError(
            "The task's prompts are messages of a chat, but the policy's tokenizer has no chat template; give it one, "
            "or the task a prompt of its own, as task.options.template does for math."
        )
    # All at once, because fast tokenizers then use every core.
    encoded = tokenizer([_prompt_text(tokenizer, problem) for problem in problems], add_special_tokens=False)
    return [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]


def _prompt_text(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> str:
    if not problem.chat:
        return problem.prompt
    messages = [{"role": "user", "content": problem.prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def drop_long_prompts(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[list[Problem], int]:
    """The problems whose prompts take at most `max_tokens` tokens, and how many were dropped."""
    encoded = encode_prompts(tokenizer, problems)
    kept = [problem for problem, ids in zip(problems, encoded, strict=True) if len(ids) <= max_tokens]
    return kept, len(problems) - len(kept)


def problem_batches(problems: Sequence[Problem], batch_size: int, seed: int) -> DatasetIterator[list[Problem]]:
    """Endless batches of problems; `get_state()` and `set_state()` save and restore the exact position.

    A batch that continues into the next epoch may hold a problem twice; `occurrence` tells the two apart.

    Raises:
      ValueError: there are fewer problems than a batch takes.
    """
    if batch_size > len(problems):
        raise ValueError(
            f"A batch takes {batch_size} prompts, but there are only {len(problems)} training problems; lower "
            "train.prompts_per_batch or use more problems."
        )
    # Grain's own "without end" is 2^63 - 1 problems, which overflows for batches of one.
    epochs = grain.MapDataset.source(problems).shuffle(seed=seed).repeat(10**9)
    dataset = epochs.batch(batch_size, batch_fn=_with_occurrences)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def _with_occurrences(batch: Sequence[Problem]) -> list[Problem]:
    """The problems, each with the number of its earlier occurrences in the batch."""
    before = collections.Counter[str]()
    counted = []
    for problem in batch:
        times = before[problem.id]
        counted.append(dataclasses.replace(problem, occurrence=times) if times else problem)
        before[problem.id] += 1
    return counted
