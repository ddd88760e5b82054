"""Ends responses at a text, such as a line break, whichever token of the tokenizer spells it."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def stop_string_ids(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> set[int]:
    """Every token of the vocabulary whose text contains one of the strings; a control token's text is its name.

    A line break is contained in ".\\n" and "\\n\\n" as well as in "\\n". A string that only several tokens together
    spell ends nothing.

    Raises:
      ValueError: no token contains a string.
    """
    if not strings:
        return set()
    texts = dict(zip(ids := sorted(tokenizer.get_vocab().values()), _decoded(tokenizer, ids), strict=True))
    found: set[int] = set()
    for string in strings:
        holding = {index for index, text in texts.items() if string and string in text}
        if not holding:
            raise ValueError(
                f"model.stop_strings: no token of the model holds {string!r}; leave it out, or correct it. A string of "
                "several tokens cannot be one."
            )
        found |= holding
    return found


def text_before(text: str, strings: Sequence[str]) -> str:
    """The part of a stop token's `text` before the first of the strings; empty if it contains none of them."""
    places = [place for string in strings if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else ""


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token alone. Tokenizers in Rust decode all at once, which takes a second instead of ten."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [str(tokenizer.decode([index])) for index in ids]
    return backend.decode_batch([[index] for index in ids], skip_special_tokens=False)
