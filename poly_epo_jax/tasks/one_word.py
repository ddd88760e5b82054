"""Tasks with one-word answers for pretrained models: name an animal, or a word that starts with "qu".

Correct answers are listed in tasks/words/.
"""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Annotated, ClassVar

from poly_epo_jax.registry import Range
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
    """Base class of tasks whose problems ask for any word of a list.

    Each correct word earns a reward of 1 and is a separate strategy. Case, articles and plural forms are ignored.
    `Problem.answer` contains the heading of the word list. The headings of training and held-out problems are fixed. If
    fewer problems are requested than there are headings, the seed determines which are used.

    Attributes:
      name: Prefix of the word files in tasks/words/, and name of the task.
      prompt: Prompt template, in which `{}` is replaced by the heading.

    Raises:
      ValueError: If more problems are requested than exist.
    """

    name: ClassVar[str]
    prompt: ClassVar[str]

    def __post_init__(self):
        train, held_out = word_list(f"{self.name}_train"), word_list(f"{self.name}_held_out")
        self._words: Mapping[str, Mapping[str, str]] = {**train, **held_out}
        used_train = self.shuffled(list(train), "num_train")[: self.num_train]
        used_held_out = self.shuffled(list(held_out), "num_held_out")[: self.num_held_out]
        self.train_problems: Sequence[Problem] = tuple(map(self.problem, used_train))
        self.held_out_problems: Sequence[Problem] = tuple(map(self.problem, used_held_out))

    def problem(self, item: str) -> Problem:
        """Returns the problem for a heading."""
        return Problem(f"{self.name}/{item}", self.prompt.format(item), item)

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns 1 for a word in the problem's list, otherwise 0."""
        return float(self.strategy(problem, generation) in self._words[problem.answer].values())

    def strategy(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the normal form of the word, whether correct or not, or None if the response is not a word."""
        return normal_form(generation.text, self._words[problem.answer])

    answer = strategy


@dataclasses.dataclass(kw_only=True, eq=False)
class CategoriesTask(OneWordTask):
    """A task whose prompts consist of two examples and a category such as `An animal:`. A correct response is `dog`.

    Spellings of one word, such as gray and grey, are the same answer.
    """

    num_train: Annotated[int, Range(0, 1000)] = 54
    num_held_out: Annotated[int, Range(0, 1000)] = 24

    name: ClassVar[str] = "categories"
    prompt: ClassVar[str] = "A tool: hammer\nA drink: tea\n{}:"


@dataclasses.dataclass(kw_only=True, eq=False)
class PrefixesTask(OneWordTask):
    """A task whose prompts consist of two examples and a line such as `A word that starts with qu:`.

    A correct response is `quick`. Any common English word with the prefix is correct.
    """

    num_train: Annotated[int, Range(0, 1000)] = 125
    num_held_out: Annotated[int, Range(0, 1000)] = 29

    name: ClassVar[str] = "prefixes"
    prompt: ClassVar[str] = (
        "A word that starts with ba: basket\nA word that starts with dr: dragon\nA word that starts with {}:"
    )


@functools.cache
def word_list(name: str) -> Mapping[str, Mapping[str, str]]:
    """Reads the word file `name`.

    In a file, `/` separates spellings of one word, of which the first is the normal form. Lines that begin with # are
    comments.

    Returns:
      A mapping from each heading to its words, which maps each spelling to its normal form. For example,
      {"An animal": {"hippo": "hippopotamus", ...}}.
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
    """Normalizes the word in a response.

    Converts the text to lower case and removes accents, a leading article, surrounding punctuation and, for words in
    `known`, the plural ending. For example, "The Hippos." becomes "hippopotamus" if `known` maps "hippo" to
    "hippopotamus", and "hippos" if `known` does not contain the word.

    Args:
      text: Text of the response.
      known: Mapping from spellings to normal forms.

    Returns:
      The normalized word, or None if the text is not in `known` and is not a word or a name of at most four words and
      `MAX_CHARACTERS` characters.
    """
    letters = unicodedata.normalize("NFD", text.strip().lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    bare = re.sub(r" +", " ", plain.strip("\"'`*.,;:!? "))
    forms = (plain, bare, ARTICLE.sub("", bare, count=1) if ARTICLE.match(bare) else bare)
    for form in forms:
        singulars = [form.removesuffix(end) + singular for end, singular in PLURALS if form.endswith(end)]
        for spelling in (form, *singulars):
            if spelling in known:
                return known[spelling]
    return forms[-1] if len(bare) <= MAX_CHARACTERS and WORD.fullmatch(forms[-1]) else None
