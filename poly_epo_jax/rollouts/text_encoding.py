"""Encodes texts that continue other texts, and replaces characters that a tokenizer cannot encode."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


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


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str, before: str = "") -> list[int]:
    """Encodes a text that continues another text.

    Some tokenizers prepend a blank to each text (Mistral 7B v0.1), or also to the text after each control token. They
    encode the text after another text, whose tokens are removed.

    Args:
      tokenizer: Tokenizer of the policy.
      text: The text.
      before: Text of the token before `text`. If empty, `text` continues ordinary text, without a blank.

    Returns:
      The token ids.

    Raises:
      ValueError: If the tokenizer prepends a blank after all texts that were tried.
    """
    alone, twice = encode_texts(tokenizer, [text, text * 2])
    shown = "".join(tokenizer.convert_ids_to_tokens(alone))
    if shown * 2 == "".join(tokenizer.convert_ids_to_tokens(twice)):
        return alone
    for other in filter(None, (before, *added_tokens(tokenizer), ".", "a", "0", "\n")):
        head, whole = encode_texts(tokenizer, [other, other + text])
        ids = whole[len(head) :]
        is_continued = ids and whole[: len(head)] == head
        if is_continued and (other == before or "".join(tokenizer.convert_ids_to_tokens(ids)) == shown[1:]):
            return ids
    raise ValueError(
        f"The policy's tokenizer prepends a blank to {text[:40]!r} within a text; use a tokenizer with "
        "add_prefix_space=false."
    )


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Returns whether each added token is special, keyed by the text of the token. Omits single characters."""
    return {token.content: token.special for token in tokenizer.added_tokens_decoder.values() if len(token.content) > 1}


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


def _can_encode(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    try:
        return bool(tokenizer(text))
    except Exception:  # `tokenizers` raises `TypeError` for lone surrogates, and `Exception` for unknown characters.
        return False


def _unencodable(tokenizer: PreTrainedTokenizerBase, text: str) -> set[str]:
    return {char for char in set(text) if not _can_encode(tokenizer, char)}
