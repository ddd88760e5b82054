"""Compares texts that are encoded in pieces with the same texts as a whole, and replaces unencodable characters."""

import numpy as np
import pytest
from fakes import Scripted, Talking, collect
from metaspace import BLANK, LINES, MISTRAL, metaspace
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from poly_epo_jax.rollouts import between_turns
from poly_epo_jax.rollouts.between_turns import encode_between, warn_about_turns
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.rollouts.text_encoding import encode_texts
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.types import Completion, Generation, Problem, Sampling

LARGE, END = np.iinfo(np.int32).max, 2
SCHEMES = ("first", "always", "normalizer", "never")
CHATS = [Problem("p", "hi", "", chat=True)]


def whole(tokenizer: PreTrainedTokenizerBase, *contents: str) -> list[int]:
    """Returns the tokens of a conversation that is encoded as one text."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(str(text), add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("template", [MISTRAL, LINES])
def test_prompt_answer_and_text_between_turns_are_the_conversation(scheme: str, template: str):
    tokenizer = metaspace(scheme, template)
    (prompt,) = encode_prompts(tokenizer, CHATS, LARGE)
    assert prompt.tolist() == whole(tokenizer, "hi")
    for reply in ("no", "hi no", "", "  x", "\nhi\n"):
        ids = encode_between(tokenizer, reply, True, "</s>", LARGE)
        expected = whole(tokenizer, "hi", "no", reply)
        place = len(expected) - len(ids)
        assert expected[place:] == ids.tolist() and expected[place - 1] == END, reply
    warn_about_turns(tokenizer, [END], Talking(), CHATS)


@pytest.mark.parametrize("scheme", ["first", "never"])
def test_spaces_that_a_stop_token_absorbs_are_omitted_or_refused(scheme: str):
    """Phi-3's tokens that end messages remove the spaces after them."""
    tokenizer = metaspace(scheme, LINES)
    tokenizer.add_special_tokens({"eos_token": AddedToken("</s>", rstrip=True, special=True)})
    ids = encode_between(tokenizer, "no", True, "</s>", LARGE).tolist()
    if whole(tokenizer, "hi", "no", "no")[-len(ids) - 1 :] == [END, *ids]:
        warn_about_turns(tokenizer, [END], Talking(), CHATS)
    else:
        with pytest.raises(ValueError, match="differently from the same text in the complete chat"):
            warn_about_turns(tokenizer, [END], Talking(), CHATS)


@pytest.mark.parametrize(("scheme", "expected"), [("first", "no"), ("always", f"{BLANK}no"), ("never", "no")])
def test_plain_replies_continue_the_text(scheme: str, expected: str):
    tokenizer = metaspace(scheme)
    ids = encode_between(tokenizer, "no", False, "</s>", LARGE)
    assert encode_texts(tokenizer, ["a</s>no"])[0][-len(ids) :] == ids.tolist()
    assert "".join(tokenizer.convert_ids_to_tokens(ids.tolist())) == expected
    # An ordinary token that ends a turn by a stop string is not followed by a blank.
    ids = encode_between(tokenizer, "no", False, "?", LARGE)
    assert encode_texts(tokenizer, ["a?no"])[0][-len(ids) :] == ids.tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("text", ["a<s>b", "<s>", "<s></s>", "no </s><s> hi", "<<s>s>", "hi<unk>", "</s>\n</s>"])
def test_names_of_control_tokens_are_encoded_without_a_blank(scheme: str, text: str):
    """The reference is the tokenizer's own option to encode these names as plain text."""
    tokenizer = metaspace(scheme, "{{ messages[0]['content'] }}")
    plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    problems = [Problem("p", text, "", chat=True), Problem("q", text, "", untrusted=(0, len(text)))]
    for ids in encode_prompts(tokenizer, problems, LARGE):
        assert "".join(tokenizer.convert_ids_to_tokens(ids.tolist())) == "".join(
            tokenizer.convert_ids_to_tokens(plain)  # pyright: ignore[reportArgumentType]
        )
        assert not set(ids.tolist()) & {0, 1, 2}


def test_tokens_that_differ_from_the_conversation_are_refused(monkeypatch: pytest.MonkeyPatch):
    alone = lambda tokenizer, text, *_: encode_texts(tokenizer, [text])[0]  # noqa: E731
    monkeypatch.setattr(between_turns, "encode_continuation", alone)
    warn_about_turns(metaspace("never"), [END], Talking(), CHATS)
    with pytest.raises(ValueError, match=r"'</s>' of a turn differently from the same text in the complete chat"):
        warn_about_turns(metaspace("first"), [END], Talking(), CHATS)


def test_a_blank_that_cannot_be_avoided_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "<s>": 1, "a": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="?")
    with pytest.raises(ValueError, match="prepends a blank to 's>'"):
        encode_prompts(fast, [Problem("p", "a<s>", "", untrusted=(0, 4))], LARGE)


LETTERS = "abcdefghijklmnopqrstuvwxyz .[]"
CHAT = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}.{% endfor %}[a]"


class Echo(Talking):
    """Replies once, with a text that the policy could make a tool return."""

    def __init__(self, text: str):
        self.text = text

    def respond(self, problem: Problem, generation: Generation) -> str | None:
        return self.text if len(generation.turns) == 1 else None


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize(
    ("letters", "text", "shown", "count"),
    [
        (f"{LETTERS}\ufffd", "no\ud83d\ud800", "no\ufffd\ufffd", 2),
        (LETTERS, "n\ud83do", "no", 1),  # The alphabet lacks U+FFFD, too.
        (LETTERS, "né\ud800", "n", 2),
        (LETTERS, "no", "no", 0),
    ],
)
def test_characters_of_replies_that_cannot_be_encoded_are_replaced_and_counted(
    is_chat: bool, letters: str, text: str, shown: str, count: int
):
    sampler = Scripted(lambda *_: "ab", letters)
    tokenizer = build_character_tokenizer(letters)
    tokenizer.chat_template = CHAT
    rollouts = Rollouts(sampler, tokenizer, Echo(text), max_prompt_tokens=20)
    problems = [Problem("p\ud83d", "hi", "", chat=is_chat)]
    ((y,),) = [group.generations for group in collect(rollouts, problems, 1, Sampling(40))]
    assert y.turns == ("ab", shown, "ab")
    between = f".[u]{shown}.[a]" if is_chat else shown
    assert tokenizer.decode(y.token_ids) == f"ab<eos>{between}ab<eos>"
    assert rollouts.metrics() == ({"rollouts/replaced_characters": float(count)} if count else {})
    assert rollouts.metrics() == {}


@pytest.mark.parametrize("is_chat", [True, False])
def test_lone_surrogates_of_prompts_are_replaced_and_counted(is_chat: bool):
    tokenizer = metaspace("first")
    problems = [Problem(text, text, "", chat=is_chat) for text in ("a\ud83d</s>b\ud800", "a\ufffd</s>b\ufffd")]
    found, expected = encode_prompts(tokenizer, problems, LARGE)
    assert found.tolist() == expected.tolist() and "\ufffd" in tokenizer.decode(found)

    class Silent(Scripted):
        def completion(self, place: int, index: int, text: str) -> Completion:
            return super().completion(place, index, "a")

    rollouts = Rollouts(Silent(lambda *_: "a", LETTERS), tokenizer, Talking(), max_prompt_tokens=99)
    collect(rollouts, problems, 2, Sampling(1))
    assert rollouts.metrics() == {"rollouts/replaced_characters": 2.0}


def test_prompts_outside_of_the_alphabet_are_named():
    tokenizer = build_character_tokenizer("abc")
    with pytest.raises(ValueError, match=r"cannot encode 'x', 'é'; add these characters to the task's alphabet"):
        encode_prompts(tokenizer, [Problem("p", "abc", ""), Problem("q", "xéa", "")], LARGE)
