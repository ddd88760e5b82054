"""A password in a server address, and a key, is neither printed nor stored, regardless of other errors."""

from pathlib import Path

import pytest

from poly_epo_jax import main
from poly_epo_jax.evaluate import __main__ as evaluate
from poly_epo_jax.rejudge import __main__ as rejudge

ROOT = Path(__file__).parents[2]
SECRET = "hunter2"
ADDRESS = f"http://me:{SECRET}@host:30000"


@pytest.mark.parametrize(
    ("module", "arguments", "complaint"),
    [
        ("main", [f"--config.rollouts.urls=http://a:1,{ADDRESS}"], "rollouts.urls contains a user or password"),
        ("main", [f"--config.rollouts.urls=me:{SECRET}@host:30000"], "rollouts.urls contains a user or password"),
        ("main", [f"--config.judge.url={ADDRESS}", "--print_config"], "judge.url contains a user or password"),
        ("main", [f"--config.model.path={ADDRESS}"], "model.path contains a user or password"),
        ("main", [ADDRESS], "unknown argument ...@host:30000"),
        ("main", [f"--config.train.num_steps={ADDRESS}"], "train.num_steps contains a user or password"),
        ("main", [f"--rollouts.urls={ADDRESS}"], "write --config.rollouts.urls=...@host:30000"),
        ("main", [f"rollouts.urls={ADDRESS}"], "write --config.rollouts.urls=...@host:30000"),
        ("evaluate", [f"--models=x={ADDRESS}", "--benchmarks=polynomial"], "--models contains a user or password"),
        ("evaluate", [f"--models=x=http://host:1/v2?key={SECRET}"], "--models contains a user or password"),
        ("rejudge", [f"--judge=llm:url=https://host?key={SECRET}", "rows"], "--judge contains a user or password"),
        ("rejudge", [f"--judge=a/b=llm:api_key_env=sk-{SECRET}", "rows"], "judge.api_key_env must be the name"),
        ("main", [f"--config.judge.url=https://host/?key={SECRET}"], "judge.url contains a user or password"),
        ("main", [f"--config.judge.api_key_env=sk-{SECRET}", "--print_config"], "judge.api_key_env must be the name"),
        ("main", [f"--config.judge.api_key_env={SECRET}", "--help"], "judge.api_key_env must be the name"),
        ("main", [f"--config.audit.judge.api_key_env={SECRET}", "--help"], "audit.judge.api_key_env must be the name"),
        ("main", [f"--judge.api_key_env={SECRET}"], "--config.judge.api_key_env=NAME"),
    ],
)
def test_passwords_and_keys_are_rejected_without_printing_them(
    module: str,
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(ROOT)
    command = {"main": main, "evaluate": evaluate, "rejudge": rejudge}[module]
    code = command.main(["--config=configs/polynomial.py", f"--config.workdir={tmp_path / 'run'}", *arguments])
    output = "".join(capfd.readouterr())
    assert code == 1 and complaint in output
    assert SECRET not in output
    assert not list(tmp_path.rglob("*.json"))
