"""Tests of the word lists, and of grading correct words in different spellings."""

import re
from importlib import resources

import pytest
from responses import response

from poly_epo_jax.tasks import TASKS, CategoriesTask, PrefixesTask
from poly_epo_jax.tasks.one_word import normal_form, word_list
from poly_epo_jax.types import HasAnswers, Problem, Strategic

NAMES = ("categories", "prefixes")
CATEGORIES, PREFIXES = CategoriesTask(), PrefixesTask()
LISTS = [
    (name, part, heading) for name in NAMES for part in ("train", "held_out") for heading in word_list(f"{name}_{part}")
]


def words_of(heading: str) -> set[str]:
    return set(CATEGORIES._words[heading].values())


def graded(heading: str, text: str) -> tuple[float, str | None]:
    task = PREFIXES if heading.islower() else CATEGORIES
    problem = Problem("", "", heading)
    return task.reward(problem, response(text)), task.strategy(problem, response(text))


@pytest.mark.parametrize(("name", "minimum"), [("categories", (36, 24)), ("prefixes", (120, 25))])
def test_training_and_held_out_headings_are_disjoint(name: str, minimum: tuple[int, int]):
    train, held_out = word_list(f"{name}_train"), word_list(f"{name}_held_out")
    assert len(train) >= minimum[0] and len(held_out) >= minimum[1] and not set(train) & set(held_out)
    task = TASKS[name]()
    assert isinstance(task, Strategic) and isinstance(task, HasAnswers)
    assert {problem.answer for problem in task.train_problems} == set(train)
    assert {problem.answer for problem in task.held_out_problems} == set(held_out)


def test_the_seed_selects_problems_if_fewer_are_requested():
    first, second = (CategoriesTask(seed=seed, num_train=20, num_held_out=9).held_out_problems for seed in (0, 1))
    assert len(first) == len(second) == 9 and first != second
    for option, limit in (("num_train", 54), ("num_held_out", 24)):  # limited separately
        with pytest.raises(ValueError, match=rf"^{option}=999 must be at most {limit}, .*task\.options\.{option}\.$"):
            CategoriesTask(**{option: 999})


@pytest.mark.parametrize(("name", "part", "heading"), LISTS, ids=[heading for *_, heading in LISTS])
def test_lists_are_long_normalized_and_without_duplicates(name: str, part: str, heading: str):
    known = word_list(f"{name}_{part}")[heading]
    assert len(set(known.values())) >= (12 if name == "categories" else 30)
    text = _file(name, part).split(f"\n{heading}: ")[1].split("\n")[0]
    spellings = re.split(r", |/", text)
    assert len(spellings) == len(set(spellings)), {s for s in spellings if spellings.count(s) > 1}
    for spelling, word in known.items():
        assert spelling == spelling.lower().strip() and known[word] == word
        assert normal_form(spelling, known) == normal_form(f" {spelling.title()}\n", known) == word
        if name == "prefixes":
            assert re.fullmatch(rf"{heading}[a-z]+", spelling)


def _file(name: str, part: str) -> str:
    return resources.files("poly_epo_jax.tasks").joinpath("words", f"{name}_{part}.txt").read_text("utf-8")


@pytest.mark.parametrize("file", [f"{name}_{part}" for name in NAMES for part in ("train", "held_out")])
def test_each_file_names_its_source_and_license(file: str):
    head = _file(*file.split("_", 1)).split("\n\n")[0]
    assert head.startswith("# ") and re.search(
        "[Ww]ritten for this project.*License|copyright has expired", head, re.DOTALL
    )


@pytest.mark.parametrize(
    ("heading", "text", "reward", "strategy"),
    [
        ("An animal", " dog", 1.0, "dog"),
        ("An animal", " Hen", 1.0, "hen"),
        ("An animal", " the Hippos.", 1.0, "hippopotamus"),
        ("An animal", " wolves", 1.0, "wolf"),
        ("An animal", " a blue  whale", 1.0, "blue whale"),
        ("An animal", " table", 0.0, "table"),
        ("An animal", " tables", 0.0, "tables"),
        ("A flower", " daisies", 1.0, "daisy"),
        ("An African country", " Mauritius", 1.0, "mauritius"),
        ("An Asian country", " The Philippines", 1.0, "philippines"),
        ("A color", " grey", 1.0, "gray"),
        ("A color", ' "Gray",', 1.0, "gray"),
        ("A chemical element", " Fe", 1.0, "iron"),
        ("A Shakespeare play", " The Tempest", 1.0, "the tempest"),
        (
            "A Shakespeare play",
            " Love\N{RIGHT SINGLE QUOTATION MARK}s Labour\N{RIGHT SINGLE QUOTATION MARK}s Lost",
            1.0,
            "love's labour's lost",
        ),
        ("A punctuation mark", " .", 1.0, "period"),
        ("A programming language", " C++", 1.0, "c++"),
        ("A US president", " Abraham Lincoln", 1.0, "lincoln"),
        ("An animal", "", 0.0, None),
        ("An animal", " ...", 0.0, None),
        ("An animal", " dog, cat, mouse", 0.0, None),
        ("An animal", " dog\nA plant: oak", 0.0, None),
        ("An animal", " dog is what I would say here", 0.0, None),
        ("An animal", " x" * 30, 0.0, None),
        ("qu", " Quick", 1.0, "quick"),
        ("qu", " queens", 1.0, "queen"),
        ("qu", " qu", 0.0, "qu"),
        ("qu", " quixt", 0.0, "quixt"),
        ("qu", " king", 0.0, "king"),
    ],
)
def test_grading(heading: str, text: str, reward: float, strategy: str | None):
    assert graded(heading, text) == (reward, strategy)


def test_lists_of_finite_categories_are_complete():
    assert len(words_of("A US state")) == 50 and len(words_of("A month")) == 12
    assert len(words_of("A chemical element")) == 118
    assert len(words_of("A US president")) == 40  # different last names
    assert {"mauritius", "eswatini", "lesotho"} <= set(CATEGORIES._words["An African country"])
    assert len(words_of("A constellation") - {"big dipper", "little dipper", "pleiades"}) == 88


def test_the_examples_in_a_prompt_are_not_problems():
    for task in (CATEGORIES, PREFIXES):
        problems = [*task.train_problems, *task.held_out_problems]
        assert not any(re.search(rf"\b{re.escape(p.answer)}:.*\n", p.prompt) for p in problems)
        assert all(p.prompt.endswith(f"{p.answer}:") and p.prompt.count("\n") == 2 for p in problems)
