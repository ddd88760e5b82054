"""What a study file may say, and one sentence for everything that it may not."""

from pathlib import Path
from typing import Any

import pytest

from poly_epo_jax.config import default
from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.study import PAPER_METHODS, Study, Task
from poly_epo_jax.study.spec import read_study

TASKS = {"polynomial": Task("configs/polynomial.py")}


def test_the_papers_methods_are_those_of_the_words_after_a_file():
    assert list(PAPER_METHODS) == list(default.METHODS)
    for name, keys in PAPER_METHODS.items():
        algo = default.get_config(name).algo
        assert {key: algo[key.removeprefix("algo.")] for key in keys} == keys


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tasks": {}}, "tasks is empty; a study needs at least one of them."),
        ({"rates": ()}, "rates is empty"),
        ({"rates": (1e-4, 0.0001)}, "rates=('0.0001', '0.0001') holds one of them twice."),
        ({"seeds": (1, 2, 1)}, "seeds=(1, 2, 1) holds one of them twice."),
        ({"methods": {"../up": {}}}, "methods holds the name '../up', which is to name folders: use letters, digits"),
        ({"tasks": {"": TASKS["polynomial"]}}, "tasks holds the name ''"),
        ({"baseline": "gpro"}, "baseline='gpro' is no method; choose from poly_epo, grpo, grpo_div."),
        ({"methods": {"a": {"seed": 3}}}, "methods['a'] sets seed, which `seeds` of the study says."),
        ({"settings": {"workdir": "x"}}, "settings sets workdir, which `folder` of the study says."),
        (
            {"tasks": {"a": Task("a.py", {"optimizer.learning_rate": 1.0})}},
            "tasks['a'] sets optimizer.learning_rate, which `rates` of the study says.",
        ),
    ],
)
def test_what_makes_no_study_is_one_sentence(fields: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as refused:
        Study(**{"tasks": TASKS, **fields})
    assert str(refused.value).startswith(sentence)


def test_the_last_method_is_the_baseline_unless_another_is_named():
    assert Study(TASKS).resolved_baseline == "grpo_div"
    assert Study(TASKS, baseline="grpo").resolved_baseline == "grpo"


def write(file: Path, body: str) -> Path:
    file.write_text(f"from poly_epo_jax.study import Study, Task\n{body}\n")
    return file


def test_a_study_is_kept_in_a_folder_of_its_files_name(tmp_path: Path):
    body = "def get_study():\n    return Study({'a': Task('a.py')}"
    assert read_study(write(tmp_path / "mine.py", f"{body})")).folder == "runs/study-mine"
    assert read_study(write(tmp_path / "mine.py", f"{body}, folder='/data')")).folder == "/data"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", "FILE has no get_study() that returns a Study; docs/study.md tells how it is written."),
        ("def get_study():\n    return 3", "FILE has no get_study() that returns a Study"),
        ("def get_study(", "FILE fails: SyntaxError: '(' was never closed"),
        ("def get_study():\n    return {}['a']", "FILE fails: KeyError: 'a'"),
        ("def get_study():\n    return Study({})", "FILE: tasks is empty"),
    ],
)
def test_a_file_without_a_study_is_one_sentence(tmp_path: Path, body: str, sentence: str):
    file = write(tmp_path / "mine.py", body)
    with pytest.raises(ConfigError) as refused:
        read_study(file)
    assert str(refused.value).startswith(sentence.replace("FILE", str(file)))


def test_a_missing_file_names_those_that_are_there(tmp_path: Path):
    write(tmp_path / "one.py", "")
    with pytest.raises(ConfigError, match=r"There is no study file .*other\.py; Python files in .*: one\.py\."):
        read_study(tmp_path / "other.py")


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "studies").glob("*.py")), ids=lambda path: path.stem
)
def test_those_of_the_repository_name_their_command(file: Path):
    study = read_study(file)
    assert f"python -m poly_epo_jax.study studies/{file.name}" in file.read_text()
    assert study.resolved_baseline in study.methods
