"""Encodes the prompts of problems, drops prompts that are too long, and defines the order of problems."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.policy import check_embedded
from poly_epo_jax.rollouts.text_encoding import added_tokens, encode_continuation, encode_texts
from poly_epo_jax.system.text import SURROGATE, first_line
from poly_epo_jax.types import Problem

BREAK = "\ud800"
"""Separates pieces of a prompt that are encoded separately. A lone surrogate never occurs in valid text."""


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], vocab_size: int
) -> list[Int[np.ndarray, " L"]]:
    """Encodes the prompts of problems.

    Plain prompts begin with the beginning-of-sequence token if the tokenizer adds one to texts, as that of Llama 3
    does. Chat templates contain it. No other special tokens are added.

    The names of control tokens in chat messages and in `Problem.untrusted` are encoded as plain text. Control tokens
    are the tokenizer's special tokens, and its added tokens that also occur in the template around this text. A name
    that consists of a single character cannot be split, and is always encoded as the control token. Lone surrogates in
    prompts are encoded as U+FFFD.

    Args:
      tokenizer: Tokenizer of the policy. Its chat template is applied to problems with `chat` True.
      problems: Problems to encode.
      vocab_size: Number of rows of the policy's embedding.

    Returns:
      The tokens [L] of each prompt, int32.

    Raises:
      ValueError: If a prompt is a chat message and the tokenizer does not have a chat template, if the template raises
        an error or does not support the tools or the system message of a problem, if the tokenizer cannot encode a
        character, or if a token is not in the policy's embedding.
    """
    if not problems:
        return []
    if any(problem.chat for problem in problems) and not tokenizer.chat_template:
        raise ValueError(
            "The task's prompts are chat messages, but the policy's tokenizer has no chat template; add a template to "
            "the tokenizer, or use plain prompts (task.options.template for task math)."
        )
    added = added_tokens(tokenizer)
    chat_text = functools.cache(lambda system: _chat_text(tokenizer, "message", system=system))
    pieces = [
        _prompt_text(tokenizer, problem, added, chat_text(problem.system) if problem.chat else "").split(BREAK)
        for problem in problems
    ]
    first = list(tokenizer("")["input_ids"])[:1]
    bos = first if first == [tokenizer.bos_token_id] else []
    prompts = []
    beginnings = encode_texts(tokenizer, [texts[0] for texts in pieces])
    for problem, beginning, texts in zip(problems, beginnings, pieces, strict=True):
        ids = [*beginning, *itertools.chain(*(encode_continuation(tokenizer, text) for text in texts[1:]))]
        prompts.append(np.asarray(ids if problem.chat or ids[:1] == bos else bos + ids, np.int32))
    check_embedded(tokenizer, np.concatenate(prompts), vocab_size)
    return prompts


def _prompt_text(tokenizer: PreTrainedTokenizerBase, problem: Problem, added: Mapping[str, bool], chat: str) -> str:
    """Returns the text of a prompt, with `BREAK` after the first character of each control token in untrusted text.

    Args:
      tokenizer: Tokenizer of the policy.
      problem: The problem.
      added: Whether each added token is special, keyed by the text of the token.
      chat: Text of the chat template with a message that contains no control token.
    """
    prompt = SURROGATE.sub("\ufffd", problem.prompt)
    start, end = (0, len(prompt)) if problem.chat else problem.untrusted
    before, untrusted, after = prompt[:start], prompt[start:end], prompt[end:]
    if problem.chat and problem.tools:
        without_tools, chat = chat, _chat_text(tokenizer, "message", problem.tools, problem.system)
        if chat == without_tools:
            raise ValueError(
                f"The chat template of the policy's tokenizer does not support tools, which problem {problem.id!r} "
                "has; use a model whose template supports them."
            )
    untrusted = break_control_tokens(untrusted, added, chat if problem.chat else before + after)
    if problem.chat:
        return _chat_text(tokenizer, untrusted, problem.tools, problem.system)
    return before + untrusted + after


def break_control_tokens(untrusted: str, added: Mapping[str, bool], trusted: str) -> str:
    """Returns an untrusted text with `BREAK` after the first character of each control token.

    Args:
      untrusted: The text.
      added: Result of `added_tokens`.
      trusted: Text around the untrusted text. Added tokens that it contains are control tokens.
    """
    for token, is_special in added.items():
        while token in untrusted and (is_special or token in trusted):
            untrusted = untrusted.replace(token, token[0] + BREAK + token[1:])
    return untrusted


def with_system_prompt(problems: Sequence[Problem], system_prompt: str) -> Sequence[Problem]:
    """Returns the problems with `task.system_prompt` as the system message of chats. If empty, they are unchanged.

    Raises:
      ValueError: If none of the problems is a chat.
    """
    if not system_prompt or not problems:
        return problems
    if not any(problem.chat for problem in problems):
        raise ValueError(
            "task.system_prompt requires prompts that are chat messages, which the task does not have; set it to '', "
            "or include the text in the prompts (task.options.template for task math)."
        )
    return [dataclasses.replace(problem, system=system_prompt if problem.chat else "") for problem in problems]


def _chat_text(
    tokenizer: PreTrainedTokenizerBase, content: str, tools: Sequence[Mapping[str, Any]] = (), system: str = ""
) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    text = render_chat(tokenizer, [*messages, {"role": "user", "content": content}], tools)
    if system.strip() not in text:
        raise ValueError(
            "The chat template of the policy's tokenizer does not support system messages; set task.system_prompt='', "
            "or use a model whose template supports them."
        )
    return text


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns the text of a chat whose next message is that of the policy.

    Args:
      tokenizer: Tokenizer with a chat template.
      messages: Messages in order, with the keys `role` and `content`.
      tools: Definitions of tools as JSON schemas, see `Problem.tools`.

    Raises:
      ValueError: If the template raises an error.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), [dict(tool) for tool in tools] or None, tokenize=False, add_generation_prompt=True
            )
        )
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        kind = "a single user message" if len(messages) == 1 else f"messages of the roles {roles}"
        remedy = "set task.system_prompt=''" if messages[0]["role"] == "system" else "set model.chat_template_options"
        raise ValueError(
            f"The chat template of the policy's tokenizer failed for {kind}: {first_line(error)}; "
            f"correct the template, {remedy}, or use plain prompts (task.options.template for task math)."
        ) from error


def drop_long_prompts(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, max_tokens: int, vocab_size: int
) -> tuple[list[Problem], int]:
    """Drops problems whose prompts have more than `max_tokens` tokens.

    Args:
      problems: Problems to filter.
      tokenizer: Tokenizer of the policy.
      max_tokens: Maximum number of prompt tokens.
      vocab_size: Number of rows of the policy's embedding.

    Returns:
      A tuple of the remaining problems, in order, and the number of dropped problems.

    Raises:
      ValueError: If a prompt cannot be encoded, see `encode_prompts`.
    """
    kept = [
        problem
        for problem, ids in zip(problems, encode_prompts(tokenizer, problems, vocab_size), strict=True)
        if len(ids) <= max_tokens
    ]
    return kept, len(problems) - len(kept)


class ProblemOrder:
    """An endless order of problems. Each epoch contains every problem once, in a new random order.

    With weights, each dataset has its own epochs. Any consecutive problems contain each dataset in proportion to its
    weight, which Grain rounds down to a multiple of 1% of the smallest weight.

    A step draws consecutive problems. The number of problems that were drawn before it determines its problems, so this
    number is all that a checkpoint stores of the data.

    Args:
      problems: All problems of an epoch.
      prompts_per_batch: Number of problems per step.
      seed: Seed of the random order.
      weights: Relative number of problems from each dataset, by `Problem.source`. If empty, each problem is drawn
        equally often.

    Raises:
      ValueError: If there are fewer than `prompts_per_batch` problems, or a dataset with a weight has no problems.
    """

    def __init__(
        self, problems: Sequence[Problem], prompts_per_batch: int, seed: int, weights: Mapping[str, float] | None = None
    ):
        if prompts_per_batch > len(problems):
            raise ValueError(
                f"train.prompts_per_batch={prompts_per_batch}, but only {len(problems)} training problems can be used; "
                "lower it, or raise train.max_prompt_tokens. data.json counts the other problems by reason."
            )
        parts = {source: [one for one in problems if one.source == source] for source in weights or ()}
        if empty := [source for source, part in parts.items() if not part]:
            raise ValueError(
                f"No training problem of {empty[0]!r} can be used; remove this dataset, or raise "
                "train.max_prompt_tokens. data.json counts the dropped problems by reason."
            )
        # `repeat(None)` means 2^63 - 1 problems in grain, which overflows.
        orders = [
            grain.MapDataset.source(part).shuffle(seed=(seed + place) % 2**32).repeat(10**9)
            for place, part in enumerate(parts.values() or [problems])
        ]
        self._order = grain.MapDataset.mix(orders, [*weights.values()] if weights else None)

    def draw(self, position: int, count: int, queued: Sequence[Problem] = ()) -> list[Problem]:
        """Returns the next `count` problems.

        Args:
          position: Number of problems that were drawn before.
          count: Number of problems.
          queued: Drawn problems that no step has used yet. The new problems differ from them, and from each other, in
            `occurrence` if they have the same problem.
        """
        before = collections.Counter[str]()
        drawn = []
        for problem in queued:
            before[problem.id] = max(before[problem.id], problem.occurrence + 1)
        for place in range(position, position + count):
            problem: Problem = self._order[place]
            times = before[problem.id]
            drawn.append(dataclasses.replace(problem, occurrence=times) if times else problem)
            before[problem.id] += 1
        return drawn
