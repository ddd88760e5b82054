"""Words by heading, from a text file in the package: `An animal: dog, cat, hippopotamus/hippo`."""

import functools
import re
import unicodedata
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

ARTICLE = re.compile(r"(?:a|an|the|some) +")
PLURALS = (
    *(("ies", "y"), ("ves", "f"), ("ves", "fe"), ("men", "man"), ("es", ""), ("s", "")),
    *(("feet", "foot"), ("teeth", "tooth"), ("geese", "goose"), ("mice", "mouse"), ("children", "child")),
)
WORD = re.compile(r"[^\W_][\w.&'+#-]*(?: [\w.&'+#-]+){0,3}")
MAX_CHARACTERS = 40


@functools.cache
def word_list(name: str) -> Mapping[str, Mapping[str, str]]:
    """For each heading, each spelling and the word it stands for: {"An animal": {"hippo": "hippopotamus", ...}}.

    `/` joins spellings of one word; the first stands for all of them. Lines that begin with # are comments.
    """
    text = resources.files("poly_epo_jax.tasks").joinpath("words", f"{name}.txt").read_text("utf-8")
    lists: dict[str, Mapping[str, str]] = {}
    for line in text.splitlines():
        heading, separator, words = line.partition(": ")
        if not separator or line.startswith("#"):
            continue
        entries = [entry.split("/") for entry in words.split(", ")]
        lists[heading] = MappingProxyType({spelling: entry[0] for entry in entries for spelling in entry})
    return MappingProxyType(lists)


def normal_form(text: str, known: Mapping[str, str]) -> str | None:
    """A response's word in lower case, without accents, article or punctuation around it; the singular, if known.

    "The Hippos." is "hippopotamus" if the list knows "hippo", and "hippos" if it does not. None if the text is not a
    word or a name of at most four words: if it is empty, a sentence, or several lines.
    """
    plain = _without_accents(text.strip().lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    bare = re.sub(r" +", " ", plain.strip("\"'`*.,;:!? "))
    forms = (plain, bare, ARTICLE.sub("", bare, count=1) if ARTICLE.match(bare) else bare)
    for form in forms:
        for spelling in (form, *_singulars(form)):
            if spelling in known:
                return known[spelling]
    return forms[-1] if len(bare) <= MAX_CHARACTERS and WORD.fullmatch(forms[-1]) else None


def _without_accents(text: str) -> str:
    return "".join(letter for letter in unicodedata.normalize("NFD", text) if not unicodedata.combining(letter))


def _singulars(word: str) -> list[str]:
    return [word.removesuffix(end) + singular for end, singular in PLURALS if word.endswith(end)]
