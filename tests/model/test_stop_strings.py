"""Tests that responses end at tokens that contain a stop string, and keep the text before it."""

import os
from pathlib import Path

import numpy as np
import pytest
from fakes import ByLetter, Scripted, collect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from poly_epo_jax.model.stop_strings import control_tokens, stop_string_ids, text_before
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.types import Completion, Problem, Sampling

BREAK, SPACE = "Ċ", "Ġ"  # Line break and space in byte-level vocabularies.
TOKENS = ("<|im_end|>", "d", "o", "g", ".", BREAK, SPACE, f".{BREAK}", f"{BREAK}{BREAK}", f"g.{BREAK}o")
WITH_BREAK = {5, 7, 8, 9}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer_object = Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, []))
    tokenizer_object.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer_object.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer_object, eos_token="<|im_end|>")


def test_only_complete_control_tokens_are_found(tokenizer: PreTrainedTokenizerFast):
    assert control_tokens(tokenizer, ("\n", "<|im_end|>", "<|im_", ".\n", "d")) == {"<|im_end|>": 0}
    assert control_tokens(tokenizer, ()) == {}


def test_all_tokens_that_contain_a_stop_string_are_found(tokenizer: PreTrainedTokenizerFast):
    assert stop_string_ids(tokenizer, ()) == set()
    assert stop_string_ids(tokenizer, ("\n",)) == WITH_BREAK
    assert stop_string_ids(tokenizer, ("\n\n",)) == {8}
    assert stop_string_ids(tokenizer, ("<|im_end|>",)) == {0}
    assert stop_string_ids(tokenizer, ("<|im_end|>", "\n")) == {0} | WITH_BREAK


@pytest.mark.parametrize("string", ["", "\t", "dog", "<|endoftext|>"])
def test_strings_that_no_token_contains_are_rejected(string: str, tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ValueError, match=r"model\.stop_strings: no token contains"):
        stop_string_ids(tokenizer, ("\n", string))


@pytest.mark.parametrize(
    ("text", "strings", "before"),
    [
        ("\n", ("\n",), ""),
        ("g.\no", ("\n",), "g."),
        ("a;\n", ("\n", ";"), "a"),
        ("<|im_end|>", ("\n",), ""),
        ("a", (), ""),
    ],
)
def test_text_before_the_first_stop_string(text: str, strings: tuple[str, ...], before: str):
    assert text_before(text, strings) == before


@pytest.mark.parametrize(
    ("ids", "reason", "text"),
    [
        ([1, 2, 3, 5], "stop", "dog"),
        ([1, 2, 3, 7], "stop", "dog."),
        ([1, 2, 9], "stop", "dog."),
        ([1, 2, 3, 8], "stop", "dog"),
        ([5], "stop", ""),
        ([1, 2, 3, 0], "stop", "dog"),
        ([1, 2, 3], "length", "dog"),
    ],
)
def test_text_is_truncated_but_all_tokens_are_trained(
    ids: list[int], reason: str, text: str, tokenizer: PreTrainedTokenizerFast
):
    class Spelling(Scripted):
        def completion(self, place: int, index: int, text: str) -> Completion:
            tokens, versions = np.array(ids, np.int32), np.zeros(len(ids), np.int32)
            return Completion(place, index, tokens, np.full(len(ids), -1, np.float32), reason, versions)  # pyright: ignore[reportArgumentType]

    rollouts = Rollouts(Spelling(lambda *_: "", "d"), tokenizer, ByLetter(), 8, ("\n",))
    ((y,),) = [group.generations for group in collect(rollouts, [Problem("p", "dog", "")], 1, Sampling(8))]
    assert y.text == text and y.finish_reason == reason
    assert y.token_ids.tolist() == ids and y.loss_mask.all() and len(y.logprobs) == len(ids)


@pytest.mark.slow
def test_stop_tokens_of_the_qwen3_vocabulary():
    folder = os.environ.get("POLY_EPO_SHARED")
    if not folder:
        pytest.skip("POLY_EPO_SHARED is not set; set it to a folder with the tokenizer of Qwen3")
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "tokenizers" / "qwen3")
    expected = {index for token, index in tokenizer.get_vocab().items() if BREAK in token}
    assert stop_string_ids(tokenizer, ("\n",)) == expected and len(expected) > 500
    assert stop_string_ids(tokenizer, ("<|im_end|>", "<|endoftext|>")) == {151643, 151645}
    control = {"<|im_end|>": 151645, "<|endoftext|>": 151643}
    assert control_tokens(tokenizer, (*control, "\n")) == control
