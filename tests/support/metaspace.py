"""Tokenizers that prepend a blank to texts, as those of Llama 2 and Mistral 7B do."""

import string

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BLANK = "▁"
SPECIAL = ("<unk>", "<s>", "</s>")
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
LINES = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def metaspace(scheme: str, chat_template: str = MISTRAL) -> PreTrainedTokenizerFast:
    """Returns a byte-pair tokenizer with byte fallback.

    Args:
      scheme: Texts to which a blank is prepended: "first" (the beginning of a text, as in Mistral 7B v0.1), "always"
        (also texts after control tokens), "normalizer" (also texts that begin with a blank) or "never".
      chat_template: The chat template.
    """
    symbols = [*(f"<0x{byte:02X}>" for byte in range(256)), BLANK, *string.ascii_letters, *string.digits, *"<>[]/?|.,"]
    merges = [*((BLANK, letter) for letter in string.ascii_lowercase), ("s", ">"), ("h", "i"), ("0", "s"), (".", "s")]
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *symbols, *map("".join, merges)))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme == "normalizer":
        prepend = [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
        tokenizer.normalizer = normalizers.Sequence(prepend)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        blanks = pre_tokenizers.Metaspace(BLANK, prepend_scheme=scheme, split=False)
        tokenizer.pre_tokenizer = blanks  # pyright: ignore[reportAttributeAccessIssue]
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)
