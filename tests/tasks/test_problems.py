"""Tests of reading and cleaning problems, and of dropping long prompts."""

import datetime
import json
import math
import os
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fakes import unchecked
from huggingface_hub import HfApi
from transformers import AutoTokenizer

from poly_epo_jax.config.keys import ConfigError, TaskSection
from poly_epo_jax.rollouts.prompts import drop_long_prompts
from poly_epo_jax.startup.read_config import make_task
from poly_epo_jax.tasks import TASKS, MathTask
from poly_epo_jax.tasks.answers import MAX_ANSWER_LENGTH
from poly_epo_jax.tasks.problems import Cleaned, Dropped, clean_problems, load_problems, read_source, usable_problems
from poly_epo_jax.types import Problem

ROWS = [{"problem": "1 + 1?", "answer": "2"}, {"problem": "Ünïcode\u2028or not?", "answer": "\\frac{1}{2}"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch):
    """Keeps the files of the datasets library in the folder of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
def shared() -> Path:
    if "POLY_EPO_SHARED" not in os.environ:
        pytest.skip("POLY_EPO_SHARED does not name a folder with data/math and tokenizers/qwen3")
    return Path(os.environ["POLY_EPO_SHARED"])


def write_jsonl(path: Path, rows=ROWS) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def problem(prompt: str, answer: str = "2", identifier: str | None = None) -> Problem:
    return Problem(id=identifier or f"{prompt}={answer}", prompt=prompt, answer=answer)


def test_rows_of_jsonl_and_parquet(tmp_path: Path):
    jsonl, parquet = write_jsonl(tmp_path / "rows.jsonl"), tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet)
    assert read_source(str(jsonl)) == read_source(str(parquet)) == ROWS
    jsonl.write_text("\n" + jsonl.read_text(encoding="utf-8") + "  \n\n", encoding="utf-8")
    assert read_source(str(jsonl)) == ROWS


def test_rows_of_a_local_dataset(tmp_path: Path):
    folder = tmp_path / "set"
    write_jsonl(folder / "train.jsonl")
    write_jsonl(folder / "test.jsonl", ROWS[1:])
    assert read_source(str(folder)) == read_source(f"{folder}:train") == read_source(f"{folder}:default:train") == ROWS
    assert read_source(f"{folder}:test") == ROWS[1:]
    with pytest.raises(ValueError, match=r"bogus.* cannot be read: .*train.*test.*name:configuration:split"):
        read_source(f"{folder}:bogus")
    with pytest.raises(ValueError, match=r"bogus.* cannot be read: .*default"):
        read_source(f"{folder}:bogus:train")


def test_dataset_names_include_configuration_and_split(monkeypatch):
    requested = []

    def load_dataset(*name, split):
        requested.append((*name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **options: None)
    for source in ("org/name", "org/name:test", "org/name:main:test"):
        assert read_source(source) == ROWS
    assert requested == [("org/name", "train"), ("org/name", "test"), ("org/name", "main", "test")]


def test_an_unreachable_dataset_raises_an_error_with_a_remedy(monkeypatch):
    requested = []

    def dataset_info(self, name: str, timeout: float) -> None:
        requested.append(name)
        raise ConnectionError("no route to host")

    def load_dataset(*name, split):
        assert datasets.config.HF_HUB_OFFLINE  # so that the client does not repeat its requests
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(OSError, match=r"'org/name:test' cannot be reached: .*no route to host.* download it"):
        read_source("org/name:test")
    assert requested == ["org/name"] and not datasets.config.HF_HUB_OFFLINE


def test_the_script_of_a_dataset_is_not_executed(tmp_path: Path):
    folder = tmp_path / "points"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (folder / "points.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(ValueError, match=r"points' cannot be read: .*script"):
        read_source(str(folder))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        ("../other.jsonl", "cannot be read: its README.md selects '.*other.jsonl', which is not in its folder"),
        ("{root}/other.jsonl", "cannot be read: its README.md selects '.*other.jsonl', which is not in its folder"),
        (
            "{root}/set/../other.jsonl",
            "cannot be read: its README.md selects '.*other.jsonl', which is not in its folder",
        ),
        ("missing.jsonl", "cannot be reached: Unable to find '.*/missing.jsonl'; check its name"),
        ("{root}/set/train.jsonl", None),
        ("train.jsonl", None),
    ],
)
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_dataset_folder_selects_only_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selected: str, message: str | None, is_relative: bool
):
    write_jsonl(tmp_path / "set" / "train.jsonl")
    write_jsonl(tmp_path / "other.jsonl")
    files = f"- split: train\n    path: {selected.format(root=tmp_path)}"
    (tmp_path / "set" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  {files}\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    source = "set" if is_relative else str(tmp_path / "set")
    if message is None:
        assert read_source(source) == ROWS
    else:
        with pytest.raises((ValueError, OSError), match=message):
            read_source(source)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


def test_a_folder_of_save_to_disk_is_rejected(tmp_path: Path):
    data_set = datasets.Dataset.from_list(ROWS)
    data_set.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": data_set}).save_to_disk(tmp_path / "several")
    for source in (tmp_path / "one", f"{tmp_path / 'several'}:test"):
        with pytest.raises(ValueError, match=r"was written by save_to_disk; .*to_parquet"):
            read_source(str(source))


def test_a_folder_whose_name_contains_a_colon(tmp_path: Path):
    (tmp_path / "a:b").mkdir()
    source = str(write_jsonl(tmp_path / "a:b" / "rows.jsonl", [{"problem": "1?", "answer": 1}]))
    assert load_problems(source)[0] == [Problem(id="rows/1", prompt="1?", answer="1")]


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "none", "none:test"])
def test_missing_paths_are_rejected(tmp_path: Path, name: str):
    with pytest.raises(FileNotFoundError, match=rf"{name} does not exist; correct the path"):
        read_source(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl contains no rows"),
        ("a.jsonl", b"\n\n", "a.jsonl contains no rows"),
        ("a.jsonl", b'{"problem": "1"}\n\n{"problem": \n', "a.jsonl line 3 is not valid JSON: "),
        ("a.jsonl", b'{"problem": "\xff\xff"}\n', "a.jsonl line 1 is not valid JSON: "),
        ("a.jsonl", b'{"problem": "1"}\n["2"]\n', "a.jsonl line 2 is not a JSON object"),
        ("a.parquet", b"PAR1 not", "a.parquet as Parquet: "),
        ("a.csv", b"problem,answer\n1,2\n", "a.csv must be a .jsonl or .parquet file"),
        ("a.jsonl", POINTER, "a.jsonl is a Git LFS pointer"),
        ("a.parquet", POINTER, "a.parquet is a Git LFS pointer"),
    ],
)
def test_malformed_files_are_rejected(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_source(str(tmp_path / name))


def test_problems_of_rows(tmp_path: Path):
    rows = [{"q": "1?", "a": 1, "name": "x"}, {"q": "2?", "a": 2.5, "name": 7}, {"q": "3?", "a": "3"}]
    source = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    problems, dropped = load_problems(source, problem_column="q", answer_column="a", id_column="name")
    assert dropped == Dropped() and problems == [
        Problem(id="x", prompt="1?", answer="1"),
        Problem(id="7", prompt="2?", answer="2.5"),
        Problem(id="rows/3", prompt="3?", answer="3"),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1?", "answer": "1"}, "Row 2 .*a.jsonl has no value in column 'problem'; .* question, answer"),
        ({"problem": "1?", "solution": "1"}, "Row 2 .*a.jsonl has no value in column 'answer'; .* problem, solution"),
        ({"problem": "", "answer": "1"}, "Row 2 .* no value in column 'problem'"),
        ({"problem": " \n", "answer": "1"}, "Row 2 .* no value in column 'problem'"),
        ({"problem": [{"role": "user"}], "answer": "1"}, "Column 'problem' in row 2 .* must be text, but is a list"),
    ],
)
def test_rows_without_a_problem_or_an_answer_column_are_rejected(tmp_path: Path, row: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load_problems(str(write_jsonl(tmp_path / "a.jsonl", [ROWS[0], row])))


GROUND_TRUTH = {"ground_truth": "4", "style": "rule"}
FLOAT_STRUCT = pyarrow.struct([("ground_truth", pyarrow.float32())])


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("4", "4"),
        (4, "4"),
        (0.1, "0.1"),
        (["69,84"], "69,84"),  # as in OlympiadBench
        ([7], "7"),
        (GROUND_TRUTH, "4"),  # as in data sets for verl
        ({"ground_truth": [4]}, "4"),
        (json.dumps(["\\frac{1}{2}"]), "\\frac{1}{2}"),
        (r'["\frac{1}{2}"]', r"\frac{1}{2}"),  # JSON would read \f as a control character
        (r'["\sqrt{2}"]', r"\sqrt{2}"),  # not valid JSON
        (json.dumps(GROUND_TRUTH), "4"),
        ("[1, 2]", "[1, 2]"),  # an interval
        ("proof by cases", "proof by cases"),
        ("1" * MAX_ANSWER_LENGTH, "1" * MAX_ANSWER_LENGTH),
    ],
)
def test_answers_in_documented_forms(tmp_path: Path, value: object, answer: str):
    problems, dropped = load_problems(str(write_jsonl(tmp_path / "a.jsonl", [{"problem": "1?", "answer": value}])))
    assert [problem.answer for problem in problems] == [answer] and dropped == Dropped()


@pytest.mark.parametrize(
    ("value", "dropped"),
    [
        *((value, Dropped(no_answer=1)) for value in (None, "", " \n", float("nan"), "notfound", [None], [""])),
        *(
            (value, Dropped(unusable_answer=1))
            for value in ([], ["1", "2"], {}, {"style": "rule"}, True, [False], float("inf"), '["1", "2"]')
        ),
        ("1" * (MAX_ANSWER_LENGTH + 1), Dropped(unusable_answer=1)),
        *((value, Dropped(proofs=1)) for value in ("proof", " Proof\n", ["proof"])),
    ],
)
def test_answers_that_no_response_could_equal_are_counted(tmp_path: Path, value: object, dropped: Dropped):
    rows = [ROWS[0], {"problem": "2?", "answer": value}, ROWS[1]]
    problems, found = load_problems(str(write_jsonl(tmp_path / "a.jsonl", rows)))
    assert [(problem.id, problem.answer) for problem in problems] == [("a/1", "2"), ("a/3", "\\frac{1}{2}")]
    assert found == dropped


def test_answers_without_the_answer_marker_are_counted(tmp_path: Path):
    rows = [{"problem": f"{text}?", "answer": text} for text in ("1 + 1 #### 2", "#### 3 ####  4 ", "2", "1 ####")]
    problems, dropped = load_problems(str(write_jsonl(tmp_path / "a.jsonl", rows)), answer_marker="####")
    assert [problem.answer for problem in problems] == ["2", "4"]
    assert dropped == Dropped(no_answer=2)


def test_a_source_without_usable_answers_is_rejected(tmp_path: Path):
    rows = [{"problem": "1?", "answer": answer} for answer in ("proof", "proof", None)]
    with pytest.raises(ValueError, match=r"No row of .*a\.jsonl .* column 'answer' \(2 proofs, 1 no answer\)"):
        load_problems(str(write_jsonl(tmp_path / "a.jsonl", rows)))


@pytest.mark.parametrize("column", ["problem", "answer", "id"])
def test_a_lone_surrogate_is_reported_with_its_row(tmp_path: Path, column: str):
    """Tokenizers and hashes raise errors for lone surrogates, which do not name the problem."""
    row = {"problem": "1?", "answer": "1", "id": "x"} | {column: "a\ud83db"}
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=r"Row 2 of .*a\.jsonl .* surrogate '\\ud83d'"):
        load_problems(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("kind", "values", "answers"),
    [
        (pyarrow.float16(), [0.1, 2048.0, 0.333], ["0.1", "2048.0", "0.333"]),
        (pyarrow.float32(), [0.1, 16_777_216.0, 1 / 3], ["0.1", "16777216.0", "0.33333334"]),
        (pyarrow.float64(), [0.1, 16_777_217.0, 1 / 3], ["0.1", "16777217.0", "0.3333333333333333"]),
        (pyarrow.float64(), [0.1 + 0.2, 4.35 * 100, 1.1 * 1.1], ["0.3", "435", "1.21"]),
        (pyarrow.list_(pyarrow.float32()), [[0.1], [2.5], [-0.7]], ["0.1", "2.5", "-0.7"]),
        (FLOAT_STRUCT, [{"ground_truth": value} for value in (0.1, 2.5, -0.7)], ["0.1", "2.5", "-0.7"]),
    ],
)
def test_floats_have_the_shortest_decimal_of_their_column(tmp_path: Path, kind: pyarrow.DataType, values, answers):
    """A response that writes 0.1 must equal the float32 number 0.1, which is 0.10000000149011612 as float64."""
    values = [np.float16(value) for value in values] if kind == pyarrow.float16() else values
    table = pyarrow.table({"problem": ["1?", "2?", "3?"], "answer": pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "set/train.parquet")
    for source in ("a.parquet", "set"):
        problems, dropped = load_problems(str(tmp_path / source))
        assert [problem.answer for problem in problems] == answers and dropped == Dropped()


def test_columns_of_any_type_are_read(tmp_path: Path):
    """Maps and tensors of float32 are rounded like other float32 numbers, also in columns that are not used."""
    shape = pyarrow.fixed_shape_tensor(pyarrow.float32(), [2])
    numbers = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array([0.1, 0.2], pyarrow.float32()), 2)
    nested = pyarrow.map_(pyarrow.string(), pyarrow.map_(pyarrow.float32(), pyarrow.binary()))
    table = pyarrow.table(
        {
            "problem": pyarrow.array([b"1?"]),
            "answer": pyarrow.array([[0.1]], pyarrow.list_(pyarrow.float32())),
            "id": pyarrow.array([b"7"], pyarrow.binary(1)),
            "map": pyarrow.array([[("a", [(0.1, b"x"), (0.3, None)])]], nested),
            "tensor": pyarrow.ExtensionArray.from_storage(shape, numbers),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert load_problems(str(tmp_path / "a.parquet"))[0] == [Problem("7", "1?", "0.1")]
    (row,) = read_source(str(tmp_path / "a.parquet"))
    assert (row["map"], row["tensor"]) == ([("a", [(0.1, "x"), (0.3, None)])], [0.1, 0.2])


DAY = datetime.datetime(2020, 1, 2)


@pytest.mark.parametrize(
    ("values", "kind", "answers"),
    [
        ([b"2", "½".encode(), b"\xff"], pyarrow.binary(), ["2", "½"]),
        ([b"2", b"3", b"\xff"], pyarrow.binary(1), ["2", "3"]),
        ([[b"2"], [b"3", b"4"], [b"\xff"]], pyarrow.list_(pyarrow.large_binary()), ["2"]),
        ([Decimal("1.50"), Decimal(2), None], pyarrow.decimal128(3, 2), ["1.50", "2.00"]),
        ([datetime.timedelta(seconds=2)], pyarrow.duration("ns"), []),
        ([DAY], pyarrow.timestamp("ns"), []),
        ([DAY.date()], pyarrow.date32(), []),
        ([DAY.time()], pyarrow.time64("us"), []),
        ([[("4", 0.5)]], pyarrow.map_(pyarrow.string(), pyarrow.float32()), []),
    ],
)
def test_answers_of_other_types_are_decoded_or_counted(tmp_path: Path, values: list, kind: pyarrow.DataType, answers):
    problems = [f"{number}?" for number in range(len(values))]
    table = pyarrow.table({"problem": problems, "answer": pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    unusable = len(values) - len(answers) - values.count(None)
    if answers:
        found, dropped = load_problems(str(tmp_path / "a.parquet"))
        assert [problem.answer for problem in found] == answers
        assert dropped == Dropped(unusable_answer=unusable, no_answer=values.count(None))
    else:
        with pytest.raises(ValueError, match="1 unusable answer"):
            load_problems(str(tmp_path / "a.parquet"))


def test_nulls_in_float_columns_are_counted(tmp_path: Path):
    table = pyarrow.table({"problem": ["1?", "2?", "3?"], "answer": pyarrow.array([None, 0.1, math.nan], "float")})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    problems, dropped = load_problems(str(tmp_path / "a.parquet"))
    assert ([problem.answer for problem in problems], dropped) == (["0.1"], Dropped(no_answer=2))


def same_number(_: Problem, first: str, second: str) -> bool:
    return float(first.strip("$")) == float(second)


def test_cleaning_a_small_example():
    first, lone, tested, equal = problem("a b"), problem("c", "5"), problem("held out"), problem("d", "1")
    rows = [
        first,
        equal,
        problem(" a\nb", "$2$"),  # the same, with the same answer
        lone,
        problem("a\u200b \u00a0b", " 2 "),  # the same again
        problem("d ", "1.0"),  # the same, with an equal answer
        problem("d", "1", "third d"),
        tested,
        problem("e", "$3$"),
        problem("e", "3.0"),
        problem("e", "4"),  # conflicts
    ]
    kept, dropped = clean_problems(rows, same_number, held_out=[problem("held\tout", "other")])
    assert kept == [first, equal, lone]
    assert dropped == Dropped(duplicates=6, conflicting=1, held_out=1)
    assert clean_problems(rows, same_number)[0] == [first, equal, lone, tested]
    assert clean_problems([], same_number) == ([], Dropped())


def test_only_different_answers_of_copies_are_compared():
    compared = []

    def same_answer(problem: Problem, first: str, second: str) -> bool:
        compared.append((problem.id, first, second))
        return True

    rows = [problem("a", answer, str(i)) for i, answer in enumerate(("1", "$1$", "1 ", "one", "o ne"))]
    assert clean_problems([*rows, problem("b", "2")], same_answer)[1] == Dropped(duplicates=4)
    assert compared == [("0", "1", "one"), ("0", "1", "o ne")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Compute 1 1/2 + 1", "Compute 11/2 + 1"),
        ("What is 2²?", "What is 22?"),
        ("the log_8 2", "the log_82"),
        ("an iceman", "a niceman"),
        ("Is it n\u0303?", "Is it n?"),
    ],
)
def test_different_problems_are_no_copies(first: str, second: str):
    rows = [problem(first, "5/2"), problem(second, "13/2")]
    assert clean_problems(rows, same_number) == (rows, Dropped())
    assert clean_problems(rows, same_number, held_out=[problem(second)]) == (rows[:1], Dropped(held_out=1))


@pytest.mark.parametrize(
    "copy", ["Cafe\u0301 a + 1", "Café\u200b a + 1", "Caf\u00ade\u2060\u0301 a + 1", "\ufeffCafé\t\u2003a+1\n"]
)
def test_copies_may_differ_in_invisible_characters_accents_and_blanks(copy: str):
    rows = [problem("Café a + 1"), problem(copy, "$2$"), problem("b")]
    assert clean_problems(rows, same_number)[1] == Dropped(duplicates=1)
    assert clean_problems(rows[1:], same_number, held_out=rows[:1]) == (rows[2:], Dropped(held_out=1))


def test_answers_that_differ_in_blanks_are_compared():
    rows = [problem("a", "1 1/2", "mixed"), problem("a", "11/2", "fraction")]
    assert clean_problems(rows, lambda *_: False) == ([], Dropped(duplicates=1, conflicting=1))


def test_ids_must_be_unique():
    rows = [problem("a", identifier="other"), problem("b", identifier="same"), problem("c", "3", "same")]
    with pytest.raises(ValueError, match="2 problems have the id 'same'"):
        clean_problems(rows, same_number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "duplicates", "conflicting"),
    [("deepscaler_40k", 39_808, 1_255, 157), ("dapo_math_17k", 17_915, 971, 15), ("gsm8k_train", 7_473, 0, 0)],
)
def test_cleaning_known_datasets(shared: Path, name: str, rows: int, duplicates: int, conflicting: int):
    """In DeepScaleR, the copies of 174 problems have different answers, 17 of which are equal, such as 9/2 and 4.5."""
    task = MathTask(train=str(shared / f"data/math/{name}.jsonl"), held_out=str(shared / "data/math/math500.jsonl"))
    overlap = 0 if name == "gsm8k_train" else 4
    assert task.dropped["train"] == Dropped(duplicates=duplicates, conflicting=conflicting, held_out=overlap)
    assert rows == len(task.train_problems) + duplicates + conflicting + overlap
    assert task.metrics() == {"grader/timeouts": 0, "grader/crashes": 0}
    task.close()


def test_long_prompts_are_dropped(shared: Path):
    """Qwen's tokenizer produces one token per digit, and <|im_end|> is one token, as in rollouts."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/qwen3")
    problems = [problem("7" * length) for length in (1, 16, 17, 40)] + [problem("7" * 15 + "<|im_end|>")]
    kept, dropped = drop_long_prompts(problems, tokenizer, max_tokens=16, vocab_size=151_936)
    assert kept == [problems[0], problems[1], problems[4]]
    assert dropped == 2
    assert drop_long_prompts([], tokenizer, max_tokens=16, vocab_size=151_936) == ([], 0)


@pytest.mark.slow
def test_few_prompts_of_a_known_dataset_are_long(shared: Path):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/qwen3")
    problems, _ = load_problems(str(shared / "data/math/dapo_math_17k.jsonl"))
    kept, dropped = drop_long_prompts(problems, tokenizer, max_tokens=1024, vocab_size=151_936)
    assert (len(kept), dropped) == (17_915 - 8, 8)


class OwnTask:
    """A task of a user that does not clean its problems."""

    train_problems: Sequence[Problem] = tuple(
        Problem(f"p{i}", prompt, "") for i, prompt in enumerate(("a b", "c", "a  b", "d"))
    )
    held_out_problems: Sequence[Problem] = (Problem("q0", "d", ""), Problem("q1", "e", ""), Problem("q2", "e", ""))

    def reward(self, problem, generation):
        return 0.0


class OwnGame(OwnTask):
    """Episodes whose first prompts are equal."""

    def start(self, problem, seed):
        raise NotImplementedError


def test_every_task_is_cleaned():
    found = usable_problems(OwnTask())
    assert {name: [problem.id for problem in part] for name, (part, _) in found.items()} == {
        "train": ["p0", "p1"],
        "held_out": ["q0", "q1"],
    }
    assert found["train"][1] == Dropped(duplicates=1, held_out=1) and found["held_out"][1] == Dropped(duplicates=1)


@pytest.mark.parametrize("part", ["train_problems", "held_out_problems"])
def test_duplicate_ids_of_an_own_task_are_rejected(part: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TASKS, "own", OwnTask)
    monkeypatch.setattr(OwnTask, part, (Problem("same", "a", ""), Problem("same", "b", "")))
    with pytest.raises(ValueError, match="2 problems have the id 'same'"):
        make_task(TaskSection("own", {}))


PLAIN = vars(Problem("p", "1?", "1"))


@pytest.mark.parametrize("part", ["train_problems", "held_out_problems"])
@pytest.mark.parametrize(
    ("problems", "message"),
    [
        (None, " must be a list or another sequence of Problem, but is a NoneType; set it to a list"),
        ((problem for problem in OwnTask.train_problems), " must be a list .*, but is a generator"),
        (np.array(OwnTask.train_problems, object), " must be a list .*, but is a ndarray"),
        (["1 + 1"], r"\[0\] must be a Problem .*, but is '1 \+ 1'"),
        ([Problem("p", "1?", "1"), unchecked(Problem, **PLAIN | {"id": 7})], r"\[1\] .*, but is Problem\(id=7,"),
        ([unchecked(Problem, **PLAIN | {"prompt": None})], r"\[0\] must be a Problem whose id, prompt and answer"),
        ([unchecked(Problem, **PLAIN | {"answer": 2})], r"\[0\] .* answer=2, .*; convert them with str\(\)"),
        ([Problem("", "2?", "2")], r"\[0\] .* an id that is not empty, but is Problem\(id='', "),
    ],
)
def test_invalid_problems_of_an_own_task_are_rejected(
    part: str, problems: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(TASKS, "own", OwnTask)
    monkeypatch.setattr(OwnTask, part, problems)
    with pytest.raises(ConfigError, match=rf"^OwnTask\.{part}{message}"):
        make_task(TaskSection("own", {}))


def test_a_task_without_held_out_problems_is_rejected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TASKS, "own", OwnTask)
    monkeypatch.delattr(OwnTask, "held_out_problems")
    with pytest.raises(ConfigError, match=r"^OwnTask\.held_out_problems must be a list"):
        make_task(TaskSection("own", {}))


def test_problems_that_are_loaded_when_they_are_read_are_not_copied(monkeypatch: pytest.MonkeyPatch):
    class Lazy(Sequence[Problem]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: Any) -> Any:
            if index >= 2:
                raise IndexError
            return Problem(f"p{index}", "1?", "1")

    lazy = Lazy()
    monkeypatch.setitem(TASKS, "own", OwnTask)
    monkeypatch.setattr(OwnTask, "train_problems", lazy)
    assert make_task(TaskSection("own", {})).train_problems is lazy


def test_problems_of_episodes_may_have_the_same_prompt():
    found = usable_problems(OwnGame())
    assert (found["train"][0], found["held_out"][0]) == (OwnGame.train_problems, OwnGame.held_out_problems)


@pytest.mark.parametrize(
    "name", [name for name in TASKS if name not in ("math", "reasoning_gym", "textarena", "tool_environment")]
)
def test_cleaning_keeps_all_problems_of_built_in_tasks(name: str):
    task = TASKS[name]()
    assert not isinstance(task, Cleaned)
    for part, dropped in usable_problems(task).values():
        assert len(part) and dropped == Dropped()
