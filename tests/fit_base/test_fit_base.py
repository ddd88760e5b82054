"""Tests of the command that fits a base policy without training it."""

from pathlib import Path

import pytest
from training_runs import SETTINGS, as_flags

from poly_epo_jax.fit_base.__main__ import main
from poly_epo_jax.startup.base_policy import base_policy_folder
from poly_epo_jax.startup.command_line import read_arguments
from poly_epo_jax.startup.read_config import make_task

CONFIG = "--config=configs/polynomial.py"
SMALL = SETTINGS | {"base.clean_steps": 4, "base.noisy_steps": 2}


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    caches = {"base.cache_dir": tmp_path / "base", "compilation_cache_dir": tmp_path / "compiled"}
    return [CONFIG, *as_flags(SMALL | caches)]


@pytest.mark.slow
def test_the_folder_is_the_policy_that_training_starts_from(flags: list[str], tmp_path: Path, capsys):
    folder = tmp_path / "models" / "base"
    assert main([*flags, f"--output={folder}"]) == 0
    config = read_arguments(flags)
    cached = base_policy_folder(config.base, config.task, make_task(config.task))
    files = sorted(path.name for path in cached.iterdir())
    assert "model.safetensors" in files and files == sorted(path.name for path in folder.iterdir())
    assert all((folder / name).read_bytes() == (cached / name).read_bytes() for name in files)
    assert main([*flags, f"--output={folder}"]) == 0  # the folder contains this policy
    assert main([*flags, "--config.base.noisy_steps=1", f"--output={folder}"])
    assert f"--output={folder}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--output is missing"),
        (["--output={new}", "--config.model.path=some/model"], "model.path=some/model"),
        (["--output={new}", "--config.task.name=polynomial_prose", "--config.task.options={}"], "demonstrations"),
    ],
    ids=["no output", "other policy", "no demonstrations"],
)
def test_impossible_fits_are_refused(more: list[str], message: str, flags, tmp_path: Path, capsys):
    new = tmp_path / "new"
    assert main([*flags, *(argument.replace("{new}", str(new)) for argument in more)])
    assert message in capsys.readouterr().err
    assert not new.exists()
