"""Finds the tokens whose text contains a stop string, such as a line break, so that generation ends at these tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def stop_string_ids(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> set[int]:
    """Returns the ids of all tokens of the vocabulary whose text contains one of the strings.

    For example, ".\\n" and "\\n\\n" contain the string "\\n". A string that is spread over several tokens does not end
    a response.

    Args:
      tokenizer: Tokenizer of the policy.
      strings: Stop strings. The text of a control token is its name, such as "<|im_end|>".

    Returns:
      The token ids.

    Raises:
      ValueError: If one of the strings is not contained in any token.
    """
    if not strings:
        return set()
    texts = dict(zip(ids := sorted(tokenizer.get_vocab().values()), _decoded(tokenizer, ids), strict=True))
    found: set[int] = set()
    for string in strings:
        matches = {index for index, text in texts.items() if string and string in text}
        if not matches:
            raise ValueError(
                f"model.stop_strings: no token contains {string!r}; correct or remove it. A stop string must be part "
                "of a single token."
            )
        found |= matches
    return found


def control_tokens(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> dict[str, int]:
    """Returns the token ids of the strings that are complete control tokens, such as "<|im_end|>", keyed by string."""
    added: dict[str, int] = tokenizer.get_added_vocab()  # pyright: ignore[reportCallIssue, reportOptionalCall]
    return {string: index for string, index in added.items() if string in strings}


def text_before(text: str, strings: Sequence[str]) -> str:
    """Returns the part of a text before the first stop string.

    Args:
      text: Text of a stop token.
      strings: Stop strings.

    Returns:
      The text before the first occurrence of any of the strings, or "" if it contains none of them.
    """
    starts = [start for string in strings if (start := text.find(string)) >= 0]
    return text[: min(starts)] if starts else ""


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Decodes each token separately. Rust tokenizers decode them in one batch, which takes 1 s instead of 10 s."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [str(tokenizer.decode([index])) for index in ids]
    return backend.decode_batch([[index] for index in ids], skip_special_tokens=False)
