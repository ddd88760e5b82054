"""Mistakes in a user's configuration file are reported in one sentence that names the file and the key."""

from pathlib import Path

import pytest

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.startup.config_file import load_config

FILE = """
from pathlib import Path
import numpy as np
from poly_epo_jax.config import default


def get_config({parameters}):
    config = default.get_config()
    {line}
    return {returned}
"""


def write(folder: Path, line: str = "", parameters: str = "", returned: str = "config") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mine.py"
    file.write_text(FILE.format(line=line or "pass", parameters=parameters, returned=returned))
    return file


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("config.train.num_stepz = 3", ["line 9", "num_stepz"]),
        ('config["train"]["num_stepz"] = 3', ["line 9", "num_stepz"]),
        ("config.trian.num_steps = 3", ["line 9", '"train"', '"trian"']),
        ("config.optimizer.learning_rate = np.float32(1e-3)", ["line 9", "'learning_rate'", "numpy.float32"]),
        ('config.workdir = Path("runs/mine")', ["line 9", "'workdir'", "PosixPath"]),
        ('config.train.num_steps = "3"', ["line 9", "'num_steps'", "'str'"]),
        ("config.train.num_steps = 0", ["train.num_steps=0 must"]),
        ('config.task.options = {"degree": Path("x")}', ["task.options={'degree': PosixPath('x')} must consist of"]),
        ('config.judge.url = "http://me:secret@host"', ["judge.url contains a user or password"]),
    ],
)
def test_invalid_keys_and_values(tmp_path: Path, line: str, words: list[str]):
    file = write(tmp_path, line)
    with pytest.raises(ConfigError) as caught:
        load_config(str(file))
    text = str(caught.value)
    assert text.startswith(str(file)) and all(word in text for word in words), text
    assert "secret" not in text and "\n" not in text and len(text) < 300, text


@pytest.mark.parametrize(
    ("returned", "words"), [("None", "value of type NoneType"), ("config.to_dict()", "value of type dict")]
)
def test_a_file_that_returns_no_configuration(tmp_path: Path, returned: str, words: str):
    file = write(tmp_path, returned=returned)
    with pytest.raises(ConfigError, match=rf"{file}: get_config\(\) returned a {words}; return a ConfigDict"):
        load_config(str(file))


def test_a_file_without_get_config(tmp_path: Path):
    (tmp_path / "mine.py").write_text("config = None\n")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/mine.py: .*get_config\(\); define it"):
        load_config(str(tmp_path / "mine.py"))


def test_names_after_a_file_without_parameters(tmp_path: Path):
    file = write(tmp_path)
    with pytest.raises(ConfigError, match=rf"{file}: get_config\(\) does not accept :grpo; define get_config\(config_"):
        load_config(f"{file}:grpo")
    needed = write(tmp_path / "needed", parameters="word")
    with pytest.raises(ConfigError, match=rf'{needed}: define get_config\(config_string=""\)'):
        load_config(str(needed))


def test_a_folder_whose_name_contains_a_colon(tmp_path: Path):
    file = write(tmp_path / "a:b", 'config.algo.loss = f"{config_string}"', 'config_string=""')
    assert load_config(str(file)).algo.loss == ""
    assert load_config(f"{file}:grpo,laptop").algo.loss == "grpo,laptop"


def test_a_mistake_in_other_code_keeps_its_traceback(tmp_path: Path):
    with pytest.raises(AttributeError, match="has no attribute 'upper'"):
        load_config(str(write(tmp_path, "(3).upper()")))


def test_a_recipe_with_names():
    assert load_config("polynomial:grpo").algo.advantages == load_config("configs/polynomial.py:grpo").algo.advantages
