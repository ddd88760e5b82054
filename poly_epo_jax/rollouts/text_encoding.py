"""Encodes texts that continue other texts, and replaces characters that a tokenizer cannot encode."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

_ORDINARY = (".", "a", "0", "\n")
"""Texts before a continuation, for tokenizers that also prepend a blank after control tokens."""


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts without adding special tokens.

    Args:
      tokenizer: Tokenizer of the policy.
      texts: The texts.

    Returns:
      The token ids of each text.

    Raises:
      ValueError: If the tokenizer cannot encode a character, such as a character that is not in the alphabet of a task.
    """
    try:
        # A single call, because fast tokenizers process a batch on all cores.
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]
    except Exception as error:  # `tokenizers` raises `Exception`, without the character.
        if not (missing := _unencodable(tokenizer, "".join(texts))):
            raise
        raise ValueError(
            f"The policy's tokenizer cannot encode {', '.join(map(repr, sorted(missing)[:20]))}; add these characters "
            "to the task's alphabet, or remove them from prompts, demonstrations and replies."
        ) from error


def replace_unencodable(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[str, int]:
    """Replaces the characters that a tokenizer cannot encode, such as lone surrogates, with U+FFFD.

    The characters are removed if the tokenizer cannot encode U+FFFD either.

    Args:
      tokenizer: Tokenizer of the policy.
      text: The text.

    Returns:
      A tuple of the text and the number of replaced characters.
    """
    if _can_encode(tokenizer, text):
        return text, 0
    missing = _unencodable(tokenizer, text)
    replacement = "\ufffd" if _can_encode(tokenizer, "\ufffd") else ""
    return "".join(replacement if char in missing else char for char in text), sum(char in missing for char in text)


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase, text: str, control_tokens: Collection[str], before: str = ""
) -> list[int]:
    """Encodes a text that continues another text, without the blank that some tokenizers prepend to every text.

    Args:
      tokenizer: Tokenizer of the policy.
      text: The text.
      control_tokens: Texts of the tokenizer's control tokens.
      before: Text directly before `text`. It is only used if it is a control token that the tokenizer recognizes.

    Returns:
      The token ids.

    Raises:
      ValueError: If the tokenizer prepends a blank, and none of the texts before the continuation prevents it.
    """
    if recognizes(tokenizer, before, control_tokens) and (ids := _encode_after(tokenizer, before, text)) is not None:
        return ids
    alone, twice = encode_texts(tokenizer, [text, text * 2])
    shown = "".join(tokenizer.convert_ids_to_tokens(alone))
    if shown * 2 == "".join(tokenizer.convert_ids_to_tokens(twice)):
        return alone
    for other in (*control_tokens, *_ORDINARY):
        ids = _encode_after(tokenizer, other, text)
        if ids and "".join(tokenizer.convert_ids_to_tokens(ids)) == shown[1:]:
            return ids
    raise ValueError(
        f"The policy's tokenizer prepends a blank to {text[:40]!r} within a text; use a tokenizer with "
        "add_prefix_space=false."
    )


def recognizes(tokenizer: PreTrainedTokenizerBase, text: str, control_tokens: Collection[str]) -> bool:
    """Returns True if a text is a control token, and the tokenizer encodes it as this token."""
    return text in control_tokens and not tokenizer.split_special_tokens


def _encode_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int] | None:
    """Encodes a text that follows another text. Returns None if a token contains characters of both texts."""
    head, ids = encode_texts(tokenizer, [before, before + text])
    return ids[len(head) :] if ids[: len(head)] == head else None


def _can_encode(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    try:
        tokenizer(text)
    except Exception:  # `tokenizers` raises `TypeError` for lone surrogates, and `Exception` for unknown characters.
        return False
    return True


def _unencodable(tokenizer: PreTrainedTokenizerBase, text: str) -> set[str]:
    return {char for char in set(text) if not _can_encode(tokenizer, char)}
