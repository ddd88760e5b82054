"""A response ends at any token that contains a stop string, and keeps the token's text before it."""

import os
from pathlib import Path

import numpy as np
import pytest
from fakes import ByLetter, Scripted, collect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from poly_epo_jax.model.stop_strings import stop_string_ids, text_before
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.types import Completion, Problem, Sampling

BREAK, SPACE = "Ċ", "Ġ"  # as byte-level vocabularies spell a line break and a space
TOKENS = ("<|im_end|>", "d", "o", "g", ".", BREAK, SPACE, f".{BREAK}", f"{BREAK}{BREAK}", f"g.{BREAK}o")
WITH_BREAK = {5, 7, 8, 9}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")


def test_every_token_that_holds_one_is_found(tokenizer: PreTrainedTokenizerFast):
    assert stop_string_ids(tokenizer, ()) == set()
    assert stop_string_ids(tokenizer, ("\n",)) == WITH_BREAK
    assert stop_string_ids(tokenizer, ("\n\n",)) == {8}
    assert stop_string_ids(tokenizer, ("<|im_end|>",)) == {0}
    assert stop_string_ids(tokenizer, ("<|im_end|>", "\n")) == {0} | WITH_BREAK


@pytest.mark.parametrize("string", ["", "\t", "dog", "<|endoftext|>"])
def test_one_that_no_token_holds_is_refused(string: str, tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ValueError, match=r"model\.stop_strings: no token of the model holds"):
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
def test_the_text_before_the_first_one(text: str, strings: tuple[str, ...], before: str):
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
def test_a_response_is_cut_there_and_all_its_tokens_are_trained_on(
    ids: list[int], reason: str, text: str, tokenizer: PreTrainedTokenizerFast
):
    class Spelling(Scripted):
        def completion(self, place: int, index: int, text: str) -> Completion:
            return Completion(place, index, np.array(ids, np.int32), np.full(len(ids), -1, np.float32), reason, 0)  # pyright: ignore[reportArgumentType]

    rollouts = Rollouts(Spelling(lambda *_: "", "d"), tokenizer, ByLetter(), 8, ("\n",))
    ((y,),) = [group.generations for group in collect(rollouts, [Problem("p", "dog", "")], 1, Sampling(8))]
    assert y.text == text and y.finish_reason == reason
    assert y.token_ids.tolist() == ids and y.loss_mask.all() and len(y.logprobs) == len(ids)


@pytest.mark.slow
def test_the_vocabulary_of_qwen3():
    folder = os.environ.get("POLY_EPO_SHARED")
    if not folder:
        pytest.skip("POLY_EPO_SHARED names no folder with the tokenizer of Qwen3")
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "tokenizers" / "qwen3")
    spelled = {index for token, index in tokenizer.get_vocab().items() if BREAK in token}
    assert stop_string_ids(tokenizer, ("\n",)) == spelled and len(spelled) > 500
    assert stop_string_ids(tokenizer, ("<|im_end|>", "<|endoftext|>")) == {151643, 151645}
