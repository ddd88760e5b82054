"""Compares texts that are encoded in pieces with the same texts as a whole, and replaces unencodable characters."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from fakes import PATIENCE, Scripted, Talking, collect
from metaspace import BLANK, LINES, MISTRAL, metaspace
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from poly_epo_jax.rollouts import between_turns, text_encoding
from poly_epo_jax.rollouts.between_turns import encode_between, warn_about_turns
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.rollouts.text_encoding import encode_continuation, encode_texts, split_text
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


def byte_level() -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer with the pattern of Qwen3, whose merges contain blanks, digits and line breaks."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )  # pyright: ignore[reportCallIssue]
    tokenizer.train_from_iterator(list(random_texts(0, 200)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<s>")


def random_texts(seed: int, count: int) -> Iterator[str]:
    """Yields texts of words, numbers, blanks, line breaks, punctuation, accents and names of control tokens."""
    rng = np.random.default_rng(seed)
    parts = [
        "no",
        "hi",
        "ab",
        "don't",
        "x1",
        "1",
        "2024",
        "0s",
        ".s",
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        ".",
        "é",
        "e\u0301",
    ]
    parts += ["<s>", "</s>", "日本", "\N{GRINNING FACE}"]
    for _ in range(count):
        yield "".join(rng.choice(parts, rng.integers(1, 40)))


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    scheme: partial(metaspace, scheme) for scheme in SCHEMES
}
TOKENIZERS["bytes"] = byte_level
TOKENIZERS["characters"] = lambda: build_character_tokenizer("".join(sorted(set("".join(random_texts(1, 100))))))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_of_pieces_are_those_of_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_encoding, "PIECE_CHARACTERS", 3)
    tokenizer, num_pieces = TOKENIZERS[name](), 0
    for text in random_texts(1, 100):
        pieces = split_text(tokenizer, text)
        ids = [encode_continuation(tokenizer, piece) for piece in pieces]
        assert "".join(pieces) == text and [*itertools.chain(*ids)] == encode_continuation(tokenizer, text), pieces
        num_pieces += len(pieces)
    assert num_pieces > 120


def test_texts_are_not_split_where_tokens_cross_blanks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_encoding, "PIECE_CHARACTERS", 3)
    crossing = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, " ": 1, "a ": 2}, [("a", " ")])))
    assert split_text(crossing, "aaa a a a a") == ["aaa a a a a"]


def test_the_rest_of_a_reply_without_room_is_not_encoded():
    tokenizer = metaspace("first")
    ids = encode_between(tokenizer, "hi no " * 40_000, False, "</s>", LARGE, max_tokens=10)
    assert 10 < len(ids) < 10_000


def test_a_shutdown_does_not_wait_for_the_tokenizer(monkeypatch: pytest.MonkeyPatch):
    begun, released = threading.Event(), threading.Event()

    def encode(*_: object) -> np.ndarray:
        begun.set()
        released.wait(PATIENCE)
        return np.zeros(1, np.int32)

    async def main() -> None:
        monkeypatch.setattr(between_turns, "encode_between", encode)
        sampler = Scripted(lambda *_: "ab", LETTERS)
        rollouts = Rollouts(sampler, sampler.tokenizer, Echo("no"), max_prompt_tokens=20)
        reading = asyncio.ensure_future(anext(rollouts.generate([Problem("p", "hi", "")], 1, Sampling(40))))
        await asyncio.to_thread(begun.wait)
        reading.cancel()
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait([reading])
        assert reading.cancelled() and not released.is_set()

    try:
        asyncio.run(main())
    finally:
        released.set()
