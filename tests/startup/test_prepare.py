"""Tests checks of the task that a run makes before anything is computed."""

from pathlib import Path
from typing import Any

import pytest
from fakes import ByLetter

from poly_epo_jax.config.default import get_config
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.set_rl import LOSSES
from poly_epo_jax.startup import prepare
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.types import Episode, Problem


class Interacting(ByLetter):
    """A task with episodes."""

    def start(self, problem: Problem, seed: int) -> Episode:
        raise AssertionError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint.best": "eval/rewards"}, r"checkpoint\.best='eval/rewards' .* eval/reward, .*eval/pass@2"),
        ({"checkpoint.best": "eval/reward", "eval.every": 0}, r"checkpoint\.best='eval/reward' .* set eval\.every"),
        ({"task.system_prompt": "Be brief."}, r"task\.system_prompt requires prompts that are chat messages"),
    ],
)
def test_keys_that_the_run_cannot_use_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
):
    monkeypatch.setattr(prepare, "make_task", lambda section: ByLetter())
    config = get_config()
    config.update({"workdir": str(tmp_path / "run"), "compilation_cache_dir": str(tmp_path / "cache")})
    config.train.update({"prompts_per_batch": 2, "prompts_per_minibatch": 2})
    config.base.cache_dir = str(tmp_path)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        prepare.prepare(read_config(config))


def test_an_own_loss_is_checked_before_the_policy_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare, "make_task", lambda section: ByLetter())
    monkeypatch.setitem(LOSSES, "own", lambda tokens: None)
    config = get_config()
    config.update({"workdir": str(tmp_path / "run"), "compilation_cache_dir": str(tmp_path / "cache")})
    config.train.update({"prompts_per_batch": 2, "prompts_per_minibatch": 2})
    config.base.cache_dir, config.algo.loss = str(tmp_path), "own"
    with pytest.raises(ConfigError, match=r"^algo\.loss='own' must return a scalar and a dictionary of metrics"):
        prepare.prepare(read_config(config))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            "rollouts",
            {"name": "sglang", "urls": "http://localhost:1", "in_flight": True},
            r"rollouts\.in_flight=True .* end of episodes",
        ),
        ("sampling", {"correlated": True}, r"sampling\.correlated=True .* after the first turn"),
    ],
)
def test_settings_that_exclude_episodes_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, values: dict[str, Any], message: str
):
    monkeypatch.setattr(prepare, "make_task", lambda section: Interacting())
    config = get_config()
    config.update({"workdir": str(tmp_path / "run"), "compilation_cache_dir": str(tmp_path / "cache")})
    config.base.cache_dir = config.rollouts.weights_dir = str(tmp_path)
    config[section].update(values)
    config.train.update({"prompts_per_batch": 2, "prompts_per_minibatch": 2})
    with pytest.raises(ConfigError, match=message):
        prepare.prepare(read_config(config))
