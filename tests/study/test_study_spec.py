"""Tests of study files: validation of fields, error messages, and the judges that they define."""

import asyncio
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from responses import response

from poly_epo_jax.config import default
from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.methods import METHODS
from poly_epo_jax.config.recipes import find_file
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.rollouts.joined_judge import JoinedJudge
from poly_epo_jax.study import PAPER_METHODS, Study, StudyTask
from poly_epo_jax.study.__main__ import main
from poly_epo_jax.study.spec import read_study
from poly_epo_jax.tasks import TASKS as TASK_REGISTRY
from poly_epo_jax.tasks.synthetic import DemonstrationStyle
from poly_epo_jax.types import Clustering, Group

TASKS = {"polynomial": StudyTask("configs/polynomial.py")}


def test_paper_methods_equal_the_presets_of_configuration_files():
    assert list(PAPER_METHODS) == list(METHODS)
    for name, keys in PAPER_METHODS.items():
        algo = default.get_config(name).algo
        assert {key: algo[key.removeprefix("algo.")] for key in keys} == keys


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tasks": {}}, "tasks is empty"),
        ({"learning_rates": ()}, "learning_rates is empty"),
        ({"learning_rates": (1e-4, 0.0001)}, "learning_rates=('0.0001', '0.0001') contains duplicates"),
        ({"seeds": (1, 2, 1)}, "seeds=(1, 2, 1) contains duplicates"),
        ({"methods": {"../up": {}}}, "methods contains '../up'"),
        ({"tasks": {"": TASKS["polynomial"]}}, "tasks contains ''"),
        ({"baseline": "gpro"}, "baseline='gpro' is not a method of the study; choose from poly_epo, grpo, grpo_div."),
        ({"methods": {"a": {"seed": 3}}}, "methods['a'] sets seed, which is controlled by `seeds`"),
        ({"settings": {"workdir": "x"}}, "settings sets workdir, which is controlled by `folder`"),
        (
            {"tasks": {"a": StudyTask("a.py", {"optimizer.learning_rate": 1.0})}},
            "tasks['a'] sets optimizer.learning_rate, which is controlled by `learning_rates`",
        ),
    ],
)
def test_invalid_fields_are_rejected(fields: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as raised:
        Study(**{"tasks": TASKS, **fields})
    assert str(raised.value).startswith(sentence)


def test_default_baseline_is_the_last_method():
    assert Study(TASKS).resolved_baseline == "grpo_div"
    assert Study(TASKS, baseline="grpo").resolved_baseline == "grpo"


def write(file: Path, body: str) -> Path:
    file.write_text(f"from poly_epo_jax.study import Study, StudyTask\n{body}\n")
    return file


def test_a_missing_study_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "none.py"), "--num_parallel=1"]) == 2
    assert str(tmp_path / "none.py") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--parallel=2", "unknown argument --parallel; write --num_parallel."),
        ("--reprot", "unknown argument --reprot; write --report."),
        ("--seed=3", "unknown argument --seed; write --config.seed=3"),
    ],
)
def test_unknown_arguments_are_reported_with_a_suggestion(
    argument: str, sentence: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(["studies/polynomial.py", argument])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_default_folder_has_the_name_of_the_study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    body = "def get_study():\n    return Study({'a': StudyTask('a.py')}"
    assert read_study(write(tmp_path / "mine.py", f"{body})")).folder == "runs/study-mine"
    assert read_study(write(tmp_path / "mine.py", f"{body}, folder='/data')")).folder == "/data"
    assert read_study(write(tmp_path / "mine.py", f"{body}, folder='~/data')")).folder == "/home/me/data"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", "FILE must define a function get_study()"),
        ("def get_study():\n    return 3", "FILE must define a function get_study()"),
        ("def get_study(", "Failed to execute FILE: SyntaxError: '(' was never closed"),
        ("def get_study():\n    return {}['a']", "Failed to execute FILE: KeyError: 'a'"),
        ("def get_study():\n    return Study({})", "FILE: tasks is empty"),
    ],
)
def test_invalid_study_file_produces_an_error(tmp_path: Path, body: str, sentence: str):
    file = write(tmp_path / "mine.py", body)
    with pytest.raises(ConfigError) as raised:
        read_study(file)
    assert str(raised.value).startswith(sentence.replace("FILE", str(file)))


def test_missing_study_file_error_lists_existing_files(tmp_path: Path):
    write(tmp_path / "one.py", "")
    with pytest.raises(ConfigError, match=r"other\.py is not a file; .* Python files in .*: one\.py\."):
        find_file(str(tmp_path / "other.py"), "studies")


@pytest.fixture
def registries() -> Iterator[None]:
    """Removes the tasks and judges that a study file registers."""
    saved = [(registry, set(registry)) for registry in (TASK_REGISTRY, JUDGES)]
    yield
    for registry, names in saved:
        for name in registry.keys() - names:
            del registry[name]


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "studies").glob("*.py")), ids=lambda path: path.stem
)
def test_study_files_of_the_repository_document_their_command(file: Path, registries: None):
    study = read_study(file)
    assert f"python -m poly_epo_jax.study studies/{file.name}" in file.read_text()
    assert study.resolved_baseline in study.methods


def test_the_judges_of_the_study_of_a_bias_separate_equal_answers_by_a_letter(registries: None):
    study = runpy.run_path(str(Path(__file__).parents[2] / "studies" / "judge_bias.py"))
    task = study["FramedPolynomialTask"]()
    problem = task.train_problems[0]
    texts = [f"{frame[0]}(x={x},y=0){frame[1]}" for x, frame in ((0, "aa"), (0, "ba"), (0, "bb"), (0, "cd"), (1, "aa"))]
    responses = Group(problem, np.zeros(1, np.int32), tuple(map(response, [*texts, "(x=0,y=0)"])))
    assert [task.answer(problem, one) for one in responses.generations] == [*["(x=0,y=0)"] * 4, "(x=1,y=0)", None]
    first, last = (study["FrameJudge"](task, None, letter=letter) for letter in ("first", "last"))
    for judge, ids in ((first, [0, 1, 1, 2, 3]), (last, [0, 0, 1, 2, 3]), (JoinedJudge(first, last), [0, 0, 0, 1, 2])):
        found = asyncio.run(judge.cluster(responses))
        assert isinstance(found, Clustering) and found.ids.tolist() == [*ids, 100]
    rng = np.random.default_rng(0)
    shown = [response(task.demonstration(problem, rng, DemonstrationStyle())) for _ in range(200)]
    assert all(task.reward(problem, one) == 1 for one in shown)
    plain = sum(one.text.startswith("a") for one in shown)
    assert abs(plain - 160) < 30
