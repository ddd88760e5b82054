"""Encodes the text between two turns of the policy, which contains the reply of an environment.

For chat messages, the text comes from the chat template: a dummy conversation is rendered, and the text after the
dummy's answer is taken. The turns of the policy are therefore never encoded again.
"""

import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.policy import check_embedded
from poly_epo_jax.rollouts.prompts import BREAK, break_control_tokens, render_chat
from poly_epo_jax.rollouts.text_encoding import (
    added_tokens,
    encode_continuation,
    encode_texts,
    replace_unencodable,
    split_text,
)
from poly_epo_jax.types import Interactive, Problem, Task

_QUESTION = {"role": "user", "content": "question"}
# Answer of the dummy conversation. Templates may remove the think block, but not the part after it.
_ANSWER = "<think>\nreasons\n</think>\n\nthe answer of a dummy"


def encode_between(
    tokenizer: PreTrainedTokenizerBase,
    reply: str,
    chat: bool,
    stop_text: str,
    vocab_size: int,
    max_tokens: int = sys.maxsize,
) -> Int[np.ndarray, " L"]:
    """Encodes the text between the policy's stop token and the first token of its next turn.

    Args:
      tokenizer: Tokenizer of the policy.
      reply: Reply of the environment.
      chat: Whether the reply is the content of a chat message. The names of control tokens in it are then encoded as
        plain text, as in prompts. Otherwise, the reply is the complete text.
      stop_text: Text of the stop token that ended the policy's turn. If the template ends the turn with the same token,
        the token is not repeated.
      vocab_size: Number of rows of the policy's embedding.
      max_tokens: Number of tokens after which the rest of a long text is not encoded.

    Returns:
      The tokens [L], int32. If they are more than `max_tokens`, tokens at the end may be missing.

    Raises:
      ValueError: If the chat template raises an error or omits a message, if the tokenizer cannot encode a character,
        or if a token is not in the embedding.
    """
    text = _chat_text_between(tokenizer, reply).removeprefix(stop_text) if chat else reply
    parts = text.split(BREAK) if chat else [text]
    pieces = [piece for part in parts for piece in split_text(tokenizer, part)]
    tokens: list[int] = []
    for place, piece in enumerate(pieces):
        if len(tokens) <= max_tokens:
            tokens += encode_continuation(tokenizer, piece, "" if place else stop_text)
    ids = np.array(tokens, np.int32)
    check_embedded(tokenizer, ids, vocab_size)
    return ids


def encode_reply(
    tokenizer: PreTrainedTokenizerBase, reply: str, chat: bool, stop_text: str, vocab_size: int, max_tokens: int
) -> tuple[str, int, Int[np.ndarray, " L"]]:
    """Replaces the characters of a reply that cannot be encoded, and encodes the reply, see `encode_between`.

    Returns:
      A tuple of the text, the number of replaced characters and the tokens [L].
    """
    text, count = replace_unencodable(tokenizer, reply)
    return text, count, encode_between(tokenizer, text, chat, stop_text, vocab_size, max_tokens)


def rewrites_history(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns True if the chat template changes an earlier message of the policy when a user message follows.

    The templates of some thinking models, such as Qwen3, remove the think blocks of earlier messages. In training, the
    policy sees its previous turns unchanged.
    """
    return render_chat(tokenizer, _conversation("message")) != (
        render_chat(tokenizer, [_QUESTION]) + _ANSWER + _chat_text_between(tokenizer, "message")
    )


def warn_about_turns(
    tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], task: Task, problems: Sequence[Problem]
) -> None:
    """Checks the tokens between turns, and prints warnings about chat templates that affect chats of several turns.

    Args:
      tokenizer: Tokenizer of the policy.
      stop_ids: Tokens that end a turn of the policy.
      task: The task. Only interactive tasks with chat messages are checked.
      problems: Problems of the task.

    Raises:
      ValueError: If the tokens of the text between two turns differ from its tokens in the complete conversation, or if
        the tokenizer cannot encode the names of its control tokens as plain text.
    """
    if not isinstance(task, Interactive) or not any(problem.chat for problem in problems):
        return
    _check_tokens(tokenizer, stop_ids)
    if rewrites_history(tokenizer):
        print(
            "Warning: The chat template changes earlier turns of the policy when a message follows, for example by "
            "removing their think blocks, but episodes keep all tokens of earlier turns; deploy the policy with a "
            "template that keeps them.",
            file=sys.stderr,
        )
    end = _chat_text_between(tokenizer, "message")
    if not any(end.startswith(str(tokenizer.decode([stop]))) for stop in stop_ids):
        print(
            f"Warning: The chat template ends the policy's turns with {end.split()[0]!r}, which is not among the stop "
            "tokens, so the policy may write the next message itself; add it to model.stop_strings.",
            file=sys.stderr,
        )


def _check_tokens(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
    """Compares the tokens after each stop token that is a control token with the tokens of the conversation."""
    added, after = added_tokens(tokenizer), _chat_text_between(tokenizer, "message")
    for stop in () if tokenizer.split_special_tokens else stop_ids:
        if (text := str(tokenizer.decode([stop]))) in added:
            chat = render_chat(tokenizer, [_QUESTION]) + _ANSWER + text + after.removeprefix(text)
            ids = encode_between(tokenizer, "message", True, text, sys.maxsize)
            if encode_texts(tokenizer, [chat])[0][-len(ids) - 1 :] != [stop, *ids]:
                raise ValueError(
                    f"The policy's tokenizer encodes the text after the stop token {text!r} of a turn differently from "
                    "the same text in the complete chat; use another tokenizer or chat template, or plain prompts."
                )
    encode_between(tokenizer, " ".join(added), True, "", sys.maxsize)


def _chat_text_between(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """Returns the text after the answer of a dummy conversation, with `BREAK` in control tokens of the content."""
    trusted = _after_answer(tokenizer, "message")
    return _after_answer(tokenizer, break_control_tokens(content, added_tokens(tokenizer), trusted))


def _after_answer(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    _, found, after = render_chat(tokenizer, _conversation(content)).partition(_ANSWER.rpartition("\n")[2])
    if not found:
        raise ValueError(
            "The chat template of the policy's tokenizer omits the message of the assistant in a conversation of "
            "several turns; correct the template, or use plain prompts."
        )
    return after


def _conversation(content: str) -> list[dict[str, str]]:
    return [_QUESTION, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": content}]
