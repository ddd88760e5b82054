"""Tests checks of the task that a run makes before anything is computed."""

from pathlib import Path

import pytest
from fakes import ByLetter

from poly_epo_jax.config.default import get_config
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.startup import prepare
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.types import Generation, Problem


class Replying(ByLetter):
    """A conversational task."""

    def reply(self, problem: Problem, generation: Generation) -> str | None:
        return None


def test_updates_during_conversations_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare, "make_task", lambda section: Replying())
    config = get_config()
    config.update({"workdir": str(tmp_path / "run"), "compilation_cache_dir": str(tmp_path / "cache")})
    config.base.cache_dir = config.rollouts.weights_dir = str(tmp_path)
    config.rollouts.update({"name": "sglang", "urls": "http://localhost:1", "in_flight": True})
    config.train.update({"prompts_per_batch": 2, "prompts_per_minibatch": 2})
    with pytest.raises(ConfigError, match=r"rollouts\.in_flight=True .* end of conversations"):
        prepare.prepare(read_config(config))
