"""Encodes texts that continue other texts, and replaces characters that a tokenizer cannot encode."""

import functools
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

PIECE_CHARACTERS = 4096
"""Minimum number of characters of the pieces of a long text."""


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
    head = text[:64]  # Whether a blank is prepended depends on the beginning of a text.
    once, start, joined = encode_texts(tokenizer, [head[:1], head, head[:1] + head])
    alone = start if head == text else encode_texts(tokenizer, [text])[0]
    if _shown(tokenizer, once) + _shown(tokenizer, start) == _shown(tokenizer, joined):
        return alone
    shown = _shown(tokenizer, alone)
    for other in filter(None, (before, *added_tokens(tokenizer), ".", "a", "0", "\n")):
        first, whole = encode_texts(tokenizer, [other, other + text])
        ids = whole[len(first) :]
        is_continued = ids and whole[: len(first)] == first
        if is_continued and (other == before or _shown(tokenizer, ids) == shown[1:]):
            return ids
    raise ValueError(
        f"The policy's tokenizer prepends a blank to {text[:40]!r} within a text; use a tokenizer with "
        "add_prefix_space=false."
    )


def _shown(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def split_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Splits a long text into pieces whose tokens are those of the whole text.

    Texts are split between a letter or digit and a single space before a letter or digit, if no token contains such a
    space: byte-pair merges and SentencePiece segmentations then do not cross the space, and the patterns of
    pre-tokenizers always begin a new word there. Tokenizers of single characters split texts anywhere.

    Args:
      tokenizer: Tokenizer of the policy.
      text: The text. If it cannot be split, or has at most `PIECE_CHARACTERS` characters, it is one piece.

    Returns:
      The pieces. All except the last have at least `PIECE_CHARACTERS` characters.
    """
    pieces, start, gaps = [], 0, _gaps(tokenizer) if len(text) > PIECE_CHARACTERS else None
    while gaps and (found := gaps.search(text, start + PIECE_CHARACTERS)):
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


@functools.lru_cache(maxsize=1)
def _gaps(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Returns a pattern of the positions at which texts can be split. Returns None if there are none."""
    added, vocabulary = added_tokens(tokenizer), tokenizer.get_vocab()
    if getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", tokenizer) is None and all(
        len(token) == 1 for token in vocabulary.keys() - added.keys()
    ):
        special = "" if tokenizer.split_special_tokens else "".join(added)
        return re.compile(rf"(?=[^\0{re.escape(special)}])")  # no added token contains the next character
    if any(re.search("[A-Za-z0-9][ ▁Ġ]", token) for token in vocabulary):
        return None
    try:  # Some tokenizers remove blanks, or add them in a way that `encode_continuation` does not recognize.
        first, whole = encode_texts(tokenizer, ["a1", "a1 b2"])
        is_safe = first + encode_continuation(tokenizer, " b2") == whole
    except ValueError:
        return None
    return re.compile("(?<=[A-Za-z0-9])(?= [A-Za-z0-9])") if is_safe else None


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
    if _can_encode(tokenizer, "".join(sorted(set(text)))):  # each character once, because texts can be long
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
