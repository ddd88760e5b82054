"""Tests of the mathematics task: prompts, extraction and normalization of answers, and rewards."""

import json
import os
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from responses import response

from poly_epo_jax.config.keys import ConfigError, JudgeSection
from poly_epo_jax.startup.read_config import make_judge
from poly_epo_jax.tasks import TASKS, MathTask
from poly_epo_jax.tasks.answer_rules import comparable
from poly_epo_jax.tasks.answers import MAX_ANSWER_LENGTH, last_boxed
from poly_epo_jax.tasks.normalization import normalize_latex
from poly_epo_jax.tasks.problems import Dropped, load_problems, source_weights
from poly_epo_jax.tasks.verifier import Outcome, Verifier
from poly_epo_jax.tasks.verify_worker import readings
from poly_epo_jax.types import Problem, Task

ROWS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(4)]


@pytest.fixture(scope="session")
def shared() -> Path:
    if "POLY_EPO_SHARED" not in os.environ:
        pytest.skip("POLY_EPO_SHARED does not name a folder with data/math")
    return Path(os.environ["POLY_EPO_SHARED"], "data/math")


@pytest.fixture(scope="module")
def verifier():
    pool = Verifier(2)
    yield pool
    pool.close()


@pytest.fixture
def make(tmp_path: Path):
    """Returns a function that creates tasks from rows. The tasks are closed after the test."""
    made: list[MathTask] = []

    def source(name: str, rows: list[dict]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    def build(train: list[dict] = ROWS, *held_out: list[dict], **options) -> MathTask:
        others = [source(f"held_out_{i}.jsonl", rows) for i, rows in enumerate(held_out)]
        made.append(MathTask(train=source("train.jsonl", train), held_out=others, **options))
        return made[-1]

    yield build
    for task in made:
        task.close()


def test_the_registry_builds_it_by_name(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]))
    task = TASKS["math"](train=str(tmp_path / "train.jsonl"))
    assert isinstance(task, MathTask) and isinstance(task, Task)
    assert (len(task.train_problems), len(task.held_out_problems)) == (1, 0)


def test_problems_and_dropped_counts(make: Callable[..., MathTask]):
    odd = {"problem": "What is 1 + 1 ?", "answer": "$2$"}
    clash = [{"problem": "Clash", "answer": answer} for answer in "12"]
    held_out = [{"problem": "Held out", "answer": "7", "id": "h"}, ROWS[3]], [{"problem": "Another", "answer": "8"}]
    task = make([*ROWS, odd, *clash], *held_out, template="Q: {problem} A:", num_workers=1)
    assert [problem.id for problem in task.train_problems] == ["train/1", "train/2", "train/3"]
    assert task.train_problems[1] == Problem("train/2", "Q: What is 1 + 1? A:", "2", untrusted=(3, 17))
    assert [problem.id for problem in task.held_out_problems] == ["h", "held_out_0/2", "held_out_1/1"]
    assert task.dropped == {"train": Dropped(duplicates=2, conflicting=1, held_out=1), "held_out": Dropped()}


def test_answers_in_documented_forms_can_be_earned(make: Callable[..., MathTask]):
    answers = [{"ground_truth": "4"}, ["69,84"], "9/2", "$4.5$", "proof", True]
    rows = [{"problem": text, "answer": answer} for text, answer in zip("abccde", answers, strict=True)]
    task = make(rows, template="{problem}", num_workers=1)
    boxed = [response(rf"\boxed{{{answer}}}") for answer in ("4", "69, 84", "4.5")]
    assert [task.reward(*pair) for pair in zip(task.train_problems, boxed, strict=True)] == [1.0] * 3
    assert task.dropped["train"] == Dropped(unusable_answer=1, proofs=1, duplicates=1)


def test_comparisons_of_reference_answers_are_not_metrics(make: Callable[..., MathTask]):
    rows = [{"problem": "Power", "answer": answer} for answer in ("0", "10^{10^{10^{10}}}")]
    task = make([*ROWS, *rows], cpu_seconds=0.1, num_workers=1)
    assert task.dropped["train"] == Dropped(duplicates=1, conflicting=1)
    assert task.metrics() == {"grader/timeouts": 0.0, "grader/crashes": 0.0}


def test_problems_are_kept_by_their_pass_rate(make, tmp_path: Path):
    """The fourth problem is missing from the table. Counts refer to problems that were not removed before."""
    counts = [("a", 0), ("b", 3), ("c", 8), ("e", 6)]
    per_problem = [{"problem": name, "num_correct": count, "num_generations": 8} for name, count in counts]
    table = tmp_path / "results.json"
    table.write_text(json.dumps({"per_problem": per_problem}))
    rows = [{"problem": f"{name}?", "answer": "1", "id": name} for name in "abcde"]

    def kept(**options: float) -> tuple[str, Dropped]:
        task = make([*rows, rows[1] | {"id": "copy"}], keep=str(table), **options)
        return "".join(problem.id for problem in task.train_problems), task.dropped["train"]

    assert kept() == ("be", Dropped(duplicates=1, pass_rate=2, no_pass_rate=1))
    assert kept(keep_min=0.0, keep_max=0.375) == ("ab", Dropped(duplicates=1, pass_rate=2, no_pass_rate=1))
    assert kept(keep_min=0.5, keep_max=1.0)[0] == "ce"
    for content in ("[]", "{}", '{"per_problem": [{"problem": "a"}]}', "no JSON"):
        table.write_text(content)
        with pytest.raises(ValueError, match=r"task\.options\.keep=.*results\.json has no pass rates"):
            kept()
    table.unlink()
    with pytest.raises(ValueError, match=r"task\.options\.keep=.*results\.json has no pass rates"):
        kept()


def test_one_held_out_source_may_be_a_string(make: Callable[..., MathTask]):
    train = make().train
    assert MathTask(train=train, held_out=train).held_out_problems[0].id == "train/1"
    assert MathTask(train=train, held_out="").held_out_problems == ()


def test_column_names_are_configurable(make: Callable[..., MathTask]):
    rows = [{"q": "1?", "a": 1, "name": "x"}]
    task = make(rows, template="{problem}", problem_column="q", answer_column="a", id_column="name")
    assert task.train_problems == (Problem(id="x", prompt="1?", answer="1", untrusted=(0, 2)),)
    with pytest.raises(ValueError, match="no value in column 'problem'; its columns are q, a, name"):
        make(rows)


def test_prompts_are_chat_messages_unless_a_template_is_set(make: Callable[..., MathTask]):
    """Braces and percent signs in problems are not format characters."""
    problem = r"Let $\frac{a}{b}$ be {problem} {} {0} %s \1."
    (made,) = make([{"problem": problem, "answer": "1"}]).train_problems
    before, after = made.prompt.split(problem)
    assert made.chat and before == ""
    assert after.startswith("\n\n") and after.endswith(r"final answer inside \boxed{}.")
    (plain,) = make([{"problem": problem, "answer": "1"}], template="Q: {problem} A:").train_problems
    assert not plain.chat and plain.prompt == f"Q: {problem} A:"


@pytest.mark.parametrize("template", ["{}", "{problem} and {problem}"])
def test_a_template_must_contain_one_placeholder(make: Callable[..., MathTask], template: str):
    with pytest.raises(ValueError, match=r"template=.* must contain \{problem\} exactly once"):
        make(template=template)


def test_ids_must_be_unique_among_held_out_sources(make: Callable[..., MathTask]):
    row = {"problem": "1?", "answer": "1", "id": "same"}
    with pytest.raises(ValueError, match="2 problems have the id 'same'"):
        make(ROWS, [row], [row | {"problem": "2?"}])


def test_the_exact_judge_is_not_supported(make: Callable[..., MathTask]):
    with pytest.raises(
        ConfigError, match=r"judge\.name='exact' requires strategy of MathTask; choose answer, llm, ngrams, none\."
    ):
        make_judge(JudgeSection(name="exact"), make())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", None),
        ("5", None),
        (r"\boxed{5}", "5"),
        (r"so \boxed{ 5 }.", "5"),
        (r"\boxed {5}", "5"),
        (r"first \boxed{4}, no, \boxed{5}. Done.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x\right.} and so on}", r"\left\{x\right."),
        (r"\boxed{a \\{b}} c}", r"a \\{b}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{4} then \boxed{103", None),
        (r"\boxed{103\}", None),
        (r"\boxed{", None),
        (r"\boxed", None),
        (r"\boxed 5", None),
        (r"\fbox{5}", None),
        (r"\boxed{}", ""),
        ("\\boxed{\n5\n}", "5"),
    ],
)
def test_the_last_box_is_the_answer(text: str, answer: str | None):
    assert last_boxed(text) == answer


def test_finding_the_box_takes_linear_time():
    for text in (r"\boxed{" * 100_000, r"\boxed{" + "{" * 500_000, "\\" * 500_000, r"\boxed " * 100_000):
        assert last_boxed(text) is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4.5e33", r"4.5 \times 10^{33}"),
        ("-2E-6", r"-2 \times 10^{-6}"),
        ("1e+05, .5e1", r"1 \times 10^{05}, .5 \times 10^{1}"),
        ("3e^2", "3e^2"),
        ("3e", "3e"),
        ("x1e5", "x1e5"),
        ("1e5x", "1e5x"),
        (r"-446.\overline{2}", r"-\frac{4020-4}{9}".replace("4020-4", str(4462 - 446))),
        (r"0.1\overline{6}", r"\frac{15}{90}"),
        ("-3./2", "-3/2"),
        ("5.", "5"),
        ("5 ,", "5"),
        (r"5\,", "5"),
        (r"\left\{x\right.", r"\left\{x\right."),
        ("0.333...", r"0.333\text{dots}"),
        (r"1 \pm \sqrt{2}", r"1 + \sqrt{2}, 1 - \sqrt{2}"),
        (r"\pm 1, \pm 2", r"\pm 1, \pm 2"),
        (r"\begin{pmatrix} 1 \end{pmatrix}", r"\begin{pmatrix} 1 \end{pmatrix}"),
        (r"\[ k = 3 \]", "k = 3"),
        (r"1 \\[2pt] 2", r"1 \\  2"),
        ("= 42", "42"),
        ("0.\\dot3", r"\frac{3}{9}"),
        (r"0.\dot{1}4\dot{2}", r"\frac{142}{999}"),
        (r"\sin^2 30^\circ", r"\sin^2 \frac{30 \pi}{180}"),
        (r"30^\circ", r"30\text{ deg}"),
        (r"\varnothing", r"\emptyset"),
        (r"1-5\mathrm{i}", "1-5 i"),
        ("1-5i", "1-5 i"),
        ("5in", "5in"),
        ("\u200b\uff11\u2060\uff12\ufeff", "12"),
        ("\u202e12", "\u202e12"),
        ("e\u0301", "\u00e9"),
        ("5~m", "5 m"),
        ("", ""),
    ],
)
def test_normalization(written: str, meant: str):
    assert normalize_latex(written) == meant


@pytest.mark.slow
def test_rewards(make: Callable[..., MathTask]):
    task = make([{"problem": "1?", "answer": r"\frac{1}{2}"}])
    (problem,) = task.train_problems
    texts = {
        r"\boxed{0.5}": 1.0,
        r"\boxed{0.5} \boxed{1}": 0.0,
        "0.5": 0.0,
        r"\boxed{0.5": 0.0,
        r"\boxed{(10^9)!}": 0.0,
    }
    with ThreadPoolExecutor(4) as executor:
        rewards = executor.map(lambda text: task.reward(problem, response(text)), texts)
    assert list(rewards) == list(texts.values())
    assert task.metrics() == {"grader/timeouts": 1.0, "grader/crashes": 0.0}
    assert task.metrics() == {"grader/timeouts": 0.0, "grader/crashes": 0.0}


def test_empty_and_too_long_answers_are_not_compared(make: Callable[..., MathTask], monkeypatch):
    task = make()
    compared = []

    def compare(gold: str, answer: str) -> Outcome:
        compared.append((gold, answer, threading.current_thread()))
        return Outcome.RIGHT

    monkeypatch.setattr(task._verifier, "compare", compare)
    for answer in ("", " ", "1" * (MAX_ANSWER_LENGTH + 1)):
        assert task.reward(task.train_problems[1], response(rf"\boxed{{{answer}}}")) == 0.0
    assert compared == []
    assert task.answer(task.train_problems[1], response("\\boxed{\u200b}")) is None
    assert task.reward(task.train_problems[1], response(rf"\boxed{{{'1' * MAX_ANSWER_LENGTH}}}")) == 1.0
    assert compared == [("2", "1" * MAX_ANSWER_LENGTH, threading.current_thread())]


STRINGS = {
    "minerva_5": "np.arcsin",
    "minerva_27": "a derivative, and the sun as a unit",
    "minerva_261": "the reduced Planck constant",
    "minerva_268": "E with an index",
    "minerva_269": "E with an index",
    "deepscaler_L5_3854": "two points without a comma",
}
"""Gold answers that math-verify cannot parse, so that only the identical string equals them."""

SAMPLES = {"gsm8k_train": 100, "dapo_math_17k": 200, "deepscaler_40k": 400}
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?")
MANY = ("math500", "minerva_math", "deepscaler_40k")
BENCHMARKS = ("aime_2024", "aime_2025", "aime_2026", "hmmt_feb_2025", "math500", "minerva_math")


def golds(shared: Path, name: str) -> list[Problem]:
    problems, _ = load_problems(str(shared / f"{name}.jsonl"))
    if name in SAMPLES:
        problems = problems[:: len(problems) // SAMPLES[name]]
    return problems


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in MANY else ()) for name in (*BENCHMARKS, *SAMPLES)],
)
def test_gold_answers_equal_themselves(shared: Path, make: Callable[..., MathTask], name: str):
    """All gold answers except the known ones are also parsed, because even an unparsed string equals itself."""
    problems, task = golds(shared, name), make()
    with ThreadPoolExecutor(4) as executor:
        boxed = [(problem, response(rf"Hence \boxed{{{problem.answer}}}.")) for problem in problems]
        rewards = list(executor.map(lambda pair: task.reward(*pair), boxed))
    assert [problem.id for problem, reward in zip(problems, rewards, strict=True) if reward != 1.0] == []
    texts = [(problem.id, normalize_latex(problem.answer)) for problem in problems]
    received = [(name, (comparable(text, text) or (text,))[0]) for name, text in texts]
    unparsed = [name for name, text in received if all(isinstance(reading, str) for reading in readings(text))]
    assert [identifier for identifier in unparsed if identifier not in STRINGS] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minerva_math", "aime_2025"])
def test_gold_answers_differ_from_other_gold_answers(shared: Path, verifier: Verifier, name: str):
    numbers = {p.answer: float(p.answer) for p in golds(shared, name) if NUMBER.fullmatch(p.answer)}
    assert len(numbers) > 20
    pairs = [tuple(random.Random(i).sample(sorted(numbers), 2)) for i in range(200)]
    with ThreadPoolExecutor(4) as executor:
        outcomes = list(executor.map(lambda pair: verifier.compare(*pair), pairs))
    equal = [pair for pair, outcome in zip(pairs, outcomes, strict=True) if outcome is not Outcome.WRONG]
    assert [pair for pair in equal if numbers[pair[0]] != numbers[pair[1]]] == []


def test_sources_are_mixed_by_weight_without_their_common_problems(make: Callable[..., MathTask], tmp_path: Path):
    files = [str(tmp_path / f"{name}.jsonl") for name in ("first", "second")]
    for file, rows in zip(files, (ROWS[:3], ROWS[2:]), strict=True):
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = MathTask(train=files, weights=[1.0, 3.5], num_workers=1)
    task.close()
    assert [(problem.id, problem.source) for problem in task.train_problems] == [
        *(("first/1", "first"), ("first/2", "first"), ("first/3", "first")),
        ("second/2", "second"),
    ]
    assert task.dropped["train"] == Dropped(duplicates=1)
    assert source_weights(task) == {"first": 1.0, "second": 3.5}
    for weights in ([1.0], [1.0, 2.0, 3.0]):
        with pytest.raises(ValueError, match=r"task\.options\.weights"):
            MathTask(train=files, weights=weights)
    with pytest.raises(ValueError, match=r"names must differ"):
        MathTask(train=[files[0]] * 2, weights=[1.0, 1.0])
    task.source_weights = {"first": 1.0, "second": 0.0}
    with pytest.raises(ValueError, match=r"positive number for each dataset .* first, second"):
        source_weights(task)
