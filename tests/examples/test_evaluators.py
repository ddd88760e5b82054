"""Tests of the files in examples/evaluators, with an evaluator if it is installed.

Each evaluator must count as many correct greedy responses of an exported policy as `poly_epo_jax.evaluate`.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from fakes import PATIENCE
from sglang_servers import SGLangServer, require_sglang, running
from training_runs import SETTINGS, as_flags, environment

from poly_epo_jax.config.keys import SamplingSection

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "evaluators"
# With these values, the policy solves some of the 40 held-out problems, but not all.
TRAINED = {key: value for key, value in SETTINGS.items() if key != "task.options"} | {
    "base.clean_steps": 400,
    "train.num_steps": 1,
}
EVALUATOR = {"HF_HUB_OFFLINE": "1", "LOCAL_API_KEY": "none"}
Policy = tuple[Path, float]


def requires(package: str) -> pytest.MarkDecorator:
    """Skips a test before `policy` is trained."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def run(*command: str | Path, variables: Mapping[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Trains and exports a policy. Returns its folder and the fraction of correct greedy responses."""
    folder = tmp_path_factory.mktemp("policy")
    config, variables = "--config=configs/polynomial.py", environment()
    run("poly_epo_jax.main", config, *as_flags(TRAINED | {"workdir": folder / "run"}), variables=variables)
    run("poly_epo_jax.export", folder / "run", folder / "policy", variables=variables)
    flags = ["--benchmarks=polynomial", "--num_generations=1", "--cluster=false", "--config.sampling.temperature=0"]
    flags += [f"--models=it={folder / 'policy'}", f"--output={folder / 'evaluation'}"]
    run("poly_epo_jax.evaluate", config, *flags, variables=variables)
    results = json.loads((folder / "evaluation" / "polynomial" / "it" / "results.json").read_text())
    correct = [problem["num_correct"] for problem in results["per_problem"]]
    assert len(correct) == 40 and 0 < sum(correct) < 40
    return folder / "policy", sum(correct) / 40


def test_the_limit_of_tokens_is_that_of_the_configuration():
    texts = [(FOLDER / name).read_text() for name in ("lm_eval_polynomial.yaml", "inspect_polynomial.py")]
    limits = re.findall(r"max_(?:gen_toks: |tokens=)(\d+)", "".join(texts))
    assert limits == [str(SamplingSection().max_tokens)] * 2


@pytest.mark.slow
@requires("lm_eval")
def test_lm_evaluation_harness(policy: Policy, tmp_path: Path):
    # The command of the documentation removes this line as well.
    folder = shutil.copytree(policy[0], tmp_path / "policy")
    file = folder / "tokenizer_config.json"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if "split_special_tokens" not in line))
    flags = ("--include_path", FOLDER, "--tasks", "lm_eval_polynomial", "--device", "cpu", "--output_path", tmp_path)
    model = ("--model", "hf", "--model_args", f"pretrained={folder},dtype=float32")
    run("lm_eval", "run", *model, *flags, variables=os.environ | EVALUATOR)
    (results,) = tmp_path.glob("*/results_*.json")
    found = json.loads(results.read_text())["results"]["lm_eval_polynomial"]
    assert (found["sample_len"], found["reward,none"]) == (40, pytest.approx(policy[1]))


@pytest.mark.slow
@requires("inspect_ai")
def test_inspect(policy: Policy, tmp_path: Path):
    require_sglang()
    with running([SGLangServer(policy[0], tmp_path / "server.log")]) as (server,):
        model = ("--model", f"openai-api-completions/local/{policy[0]}", "--model-base-url", f"{server.url}/v1")
        flags = ("--max-retries", "0", "--log-dir", tmp_path, "--log-format", "json", "--display", "none")
        file = "examples/evaluators/inspect_polynomial.py"  # inspect-ai refuses absolute paths
        run("inspect_ai", "eval", file, *model, *flags, variables=os.environ | EVALUATOR)
    (log,) = tmp_path.glob("*.json")
    results = json.loads(log.read_text())["results"]
    assert results["completed_samples"] == 40
    assert results["scores"][0]["metrics"]["mean"]["value"] == pytest.approx(policy[1])
