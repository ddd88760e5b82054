"""The tokenizer of the tiny policies: one token per character."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def build_character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with `<pad>` = 0, `<eos>` = 1 and then one token per character, in the order of `alphabet`.

    For every text over the alphabet, `decode(encode(text)) == text`: encoding adds no special tokens and decoding no
    spaces. The `tokenizers` library refuses a text with a character outside the alphabet, with an `Exception` about a
    missing unknown token. `save_pretrained` and `AutoTokenizer.from_pretrained` preserve all of this.

    Raises:
      ValueError: the alphabet is empty or repeats a character.
    """
    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise ValueError(f"alphabet is {alphabet!r}; it must name at least one character and none of them twice.")
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *alphabet))}
    # A WordLevel model without an unknown token raises on unknown characters; other models would silently drop them.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        split_special_tokens=True,  # the text "<eos>" is characters, as the alphabet may well contain these
        clean_up_tokenization_spaces=False,
    )
