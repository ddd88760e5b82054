"""Tests of reading and cleaning problems, and of dropping long prompts."""

import json
import os
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from poly_epo_jax.rollouts.prompts import drop_long_prompts
from poly_epo_jax.tasks.problems import Dropped, clean_problems, load_problems, read_source
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
    for source in ("org/name", "org/name:test", "org/name:main:test"):
        assert read_source(source) == ROWS
    assert requested == [("org/name", "train"), ("org/name", "test"), ("org/name", "main", "test")]


def test_an_unreachable_dataset_raises_an_error_with_a_remedy(monkeypatch):
    def load_dataset(*name, split):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(OSError, match=r"'org/name:test' cannot be reached: Couldn't .* download it"):
        read_source("org/name:test")


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
    ],
)
def test_malformed_files_are_rejected(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_source(str(tmp_path / name))


def test_problems_of_rows(tmp_path: Path):
    rows = [{"q": "1?", "a": 1, "name": "x"}, {"q": "2?", "a": 2.5, "name": 7}, {"q": "3?", "a": "3"}]
    source = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert load_problems(source, problem_column="q", answer_column="a", id_column="name") == [
        Problem(id="x", prompt="1?", answer="1"),
        Problem(id="7", prompt="2?", answer="2.5"),
        Problem(id="rows/3", prompt="3?", answer="3"),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1?", "answer": "1"}, "Row 2 .*a.jsonl has no value in column 'problem'; .* question, answer"),
        ({"problem": "1?", "solution": "1"}, "Row 2 .*a.jsonl has no value in column 'answer'; .* problem, solution"),
        ({"problem": "1?", "answer": None}, "Row 2 .* no value in column 'answer'"),
        ({"problem": "", "answer": "1"}, "Row 2 .* no value in column 'problem'"),
        ({"problem": [{"role": "user"}], "answer": "1"}, "Column 'problem' in row 2 .* must be text, but is a list"),
    ],
)
def test_rows_without_a_problem_or_answer_are_rejected(tmp_path: Path, row: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load_problems(str(write_jsonl(tmp_path / "a.jsonl", [ROWS[0], row])))


def test_cleaning_a_small_example():
    first, lone, tested = problem("a b"), problem("c", "5"), problem("held out")
    rows = [
        first,
        problem("d", "1"),
        problem(" a\nb", "$2$"),  # the same, with the same answer
        lone,
        problem("ab", " 2 "),  # the same again
        problem("d ", "1.0"),  # conflicts, because answers are compared as text
        problem("d", "1", "third d"),
        tested,
    ]
    kept, dropped = clean_problems(rows, held_out=[problem("held\tout", "other")])
    assert kept == [first, lone]
    assert dropped == Dropped(duplicates=4, conflicting=1, held_out=1)
    assert clean_problems(rows)[0] == [first, lone, tested]
    assert clean_problems([]) == ([], Dropped())


def test_ids_must_be_unique():
    with pytest.raises(ValueError, match="2 problems have the id 'same'"):
        clean_problems([problem("a", identifier="other"), problem("b", identifier="same"), problem("c", "3", "same")])


@pytest.mark.parametrize(
    ("name", "rows", "duplicates", "conflicting"),
    [("deepscaler_40k", 39_808, 1_266, 174), ("dapo_math_17k", 17_915, 996, 15), ("gsm8k_train", 7_473, 0, 0)],
)
def test_cleaning_known_datasets(shared: Path, name: str, rows: int, duplicates: int, conflicting: int):
    problems = load_problems(str(shared / "data/math" / f"{name}.jsonl"))
    held_out = load_problems(str(shared / "data/math/math500.jsonl"))
    kept, dropped = clean_problems(problems, held_out)
    overlap = 0 if name == "gsm8k_train" else 4
    assert dropped == Dropped(duplicates=duplicates, conflicting=conflicting, held_out=overlap)
    assert len(problems) == rows == len(kept) + duplicates + conflicting + overlap


def test_long_prompts_are_dropped(shared: Path):
    """Qwen's tokenizer produces one token per digit, and <|im_end|> is one token, as in rollouts."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/qwen3")
    problems = [problem("7" * length) for length in (1, 16, 17, 40)] + [problem("7" * 15 + "<|im_end|>")]
    kept, dropped = drop_long_prompts(problems, tokenizer, max_tokens=16)
    assert kept == [problems[0], problems[1], problems[4]]
    assert dropped == 2
    assert drop_long_prompts([], tokenizer, max_tokens=16) == ([], 0)


@pytest.mark.slow
def test_few_prompts_of_a_known_dataset_are_long(shared: Path):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/qwen3")
    problems = load_problems(str(shared / "data/math/dapo_math_17k.jsonl"))
    kept, dropped = drop_long_prompts(problems, tokenizer, max_tokens=1024)
    assert (len(kept), dropped) == (17_915 - 8, 8)
