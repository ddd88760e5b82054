"""Name one: an animal, a word that starts with "qu". Short open questions for pretrained models, with lists."""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Annotated, ClassVar

from poly_epo_jax.config.checks import Range
from poly_epo_jax.tasks.synthetic import SyntheticTask
from poly_epo_jax.types import Generation, Problem

ARTICLE = re.compile(r"(?:a|an|the|some) +")
PLURALS = (
    *(("ies", "y"), ("ves", "f"), ("ves", "fe"), ("men", "man"), ("es", ""), ("s", "")),
    *(("feet", "foot"), ("teeth", "tooth"), ("geese", "goose"), ("mice", "mouse"), ("children", "child")),
)
WORD = re.compile(r"[^\W_][\w.&'+#-]*(?: [\w.&'+#-]+){0,3}")
MAX_CHARACTERS = 40


@dataclasses.dataclass(kw_only=True, eq=False)
class OneWordTask(SyntheticTask):
    """Every right word earns 1 and is a strategy of its own; case, articles and the plural make no difference.

    The words are in tasks/words/, whose files name their source. The held-out headings are always the same; if fewer
    problems are requested than there are, the seed draws them. A problem's `answer` holds the heading of its list.

    Raises:
      ValueError: more problems are requested than there are.
    """

    name: ClassVar[str]
    prompt: ClassVar[str]

    def __post_init__(self):
        train, held_out = word_list(f"{self.name}_train"), word_list(f"{self.name}_held_out")
        self._words: Mapping[str, Mapping[str, str]] = {**train, **held_out}
        self.train_problems = self.drawn(list(train), self.num_train)
        self.held_out_problems = self.drawn(list(held_out), self.num_held_out)

    def problem(self, item: str) -> Problem:
        return Problem(f"{self.name}/{item}", self.prompt.format(item), item)

    def reward(self, problem: Problem, generation: Generation) -> float:
        """1 for a word of the list, else 0."""
        return float(self.strategy(problem, generation) in self._words[problem.answer].values())

    def strategy(self, problem: Problem, generation: Generation) -> str | None:
        """The word, right or wrong, in its normal form. None for anything but a word."""
        return normal_form(generation.text, self._words[problem.answer])

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """The same word as `strategy`."""
        return self.strategy(problem, generation)


@dataclasses.dataclass(kw_only=True, eq=False)
class CategoriesTask(OneWordTask):
    """Prompt: two examples and `An animal:`; response: `dog`, or any other such word. Gray and grey are the same."""

    num_train: Annotated[int, Range(0, 1000)] = 54
    num_held_out: Annotated[int, Range(0, 1000)] = 24

    name: ClassVar[str] = "categories"
    prompt: ClassVar[str] = "A tool: hammer\nA drink: tea\n{}:"


@dataclasses.dataclass(kw_only=True, eq=False)
class PrefixesTask(OneWordTask):
    """Prompt: two examples and `A word that starts with qu:`; response: `quick`, or any other common English word."""

    num_train: Annotated[int, Range(0, 1000)] = 125
    num_held_out: Annotated[int, Range(0, 1000)] = 29

    name: ClassVar[str] = "prefixes"
    prompt: ClassVar[str] = (
        "A word that starts with ba: basket\nA word that starts with dr: dragon\nA word that starts with {}:"
    )


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
