"""A run is only resumed with the rubric and the model that judged its earlier steps."""

import json
from pathlib import Path

import pytest
from fake_judge import FakeJudge, serving
from fork_server import ForkServer
from training_runs import SETTINGS, as_flags

pytestmark = pytest.mark.slow


def test_a_changed_rubric_or_judge_model_is_rejected(
    fork_server: ForkServer, tmp_path: Path, caches: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    run, rubric = tmp_path / "run", tmp_path / "rubric.md"

    def train(num_steps: int) -> str:
        """Trains to a step and returns the error message."""
        judge = {"judge.name": "llm", "judge.url": url, "judge.options": {"prompt_file": str(rubric)}}
        changes = judge | {"workdir": run, "train.num_steps": num_steps, "optimizer.schedule": "constant"}
        settings = SETTINGS | caches | changes | {"eval.every": 0}
        ended = fork_server.run("poly_epo_jax.main", ["--config=configs/polynomial.py", *as_flags(settings)])
        last = ended.stderr.splitlines()[-1:]  # warnings may come first
        assert (ended.returncode != 0) == any(line.startswith("Error: ") for line in last), ended.stderr
        return ended.stderr if ended.returncode else ""

    with serving() as url:
        rubric.write_text("Cluster.")
        assert train(1) == ""
        digests = json.loads((run / "about.json").read_text())["digests"]
        assert digests["judge.model"] == "judge-1"
        rubric.write_text("Cluster by method.")
        error = train(2)
        assert f"{run} was started: judge.options.prompt_file." in error
        rubric.write_text("Cluster.")
        monkeypatch.setattr(FakeJudge, "model", "judge-2")
        assert f"{run} was started: judge.model." in train(2)
        monkeypatch.setattr(FakeJudge, "model", "judge-1")
        assert train(2) == ""
        assert json.loads((run / "about.json").read_text())["digests"] == digests
