import numpy as np
import pytest
from transformers import AutoTokenizer

from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.tasks import MultiplicationTask, PolynomialTask

HOSTILE = " \n\t'.,!?<>|/pademos1é中"  # characters that tokenizers may normalize, clean up or parse as special tokens


def reloaded(tokenizer, path):
    tokenizer.save_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(params=["fresh", "reloaded"])
def tokenize(request, tmp_path):
    """Builds a tokenizer, optionally saved to a folder and reloaded."""
    build = build_character_tokenizer
    return build if request.param == "fresh" else lambda alphabet: reloaded(build(alphabet), tmp_path)


@pytest.mark.parametrize("alphabet", [HOSTILE, *(task.alphabet for task in (PolynomialTask, MultiplicationTask))])
def test_random_texts_over_the_alphabet_survive_a_round_trip(tokenize, alphabet):
    tokenizer, rng = tokenize(alphabet), np.random.default_rng(0)
    for length in range(40):
        text = "".join(rng.choice(list(alphabet), size=length))
        ids = tokenizer.encode(text)
        assert ids == tokenizer(text)["input_ids"] == [2 + alphabet.index(c) for c in text]
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["", " ", "  a  ", "a .", "do n't", " , . ! ?", "\n", "\n\n a\t", "<pad>", "a<eos>", "é", "中 中"]
)
def test_unusual_texts_survive_a_round_trip(tokenize, text):
    tokenizer = tokenize(HOSTILE + "nt")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)


def test_special_tokens(tokenize):
    tokenizer = tokenize("ab")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eos>", 1)
    assert len(tokenizer) == tokenizer.vocab_size == 4
    assert tokenizer.decode([2, 3, 1, 0]) == "ab<eos><pad>"
    assert tokenizer.decode([2, 3, 1, 0], skip_special_tokens=True) == "ab"
    assert tokenizer(["a", "bab"], padding=True)["attention_mask"] == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("text", ["c", "abc", "A", " a", "a\n"])
def test_characters_outside_the_alphabet_are_rejected(tokenize, text):
    tokenizer = tokenize("ab")
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
        tokenizer.encode(text)


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_invalid_alphabets_are_rejected(alphabet):
    with pytest.raises(ValueError, match=f"alphabet is '{alphabet}'"):
        build_character_tokenizer(alphabet)
