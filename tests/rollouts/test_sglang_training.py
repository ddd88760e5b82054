"""Tests small versions of the laptop run with real SGLang servers. test_node.py tests the run of the paper."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sglang_servers import ROOT, SGLangServer, require_sglang, require_torch, running
from training_runs import SETTINGS, Run, as_flags, rows_of

from poly_epo_jax import main
from poly_epo_jax.doctor.runner import Finding, RunContext
from poly_epo_jax.doctor.servers import check_weights
from poly_epo_jax.evaluate.__main__ import main as evaluate
from poly_epo_jax.evaluate.folder import read_generations
from poly_epo_jax.fit_base.__main__ import main as fit_base
from poly_epo_jax.startup.command_line import config_parser, run_command

pytestmark = pytest.mark.slow

# The base policy solves half of the problems, and the learning rate is large enough to improve it in 20 steps.
SMALL = SETTINGS | {
    "base.clean_steps": 300,
    "base.noisy_steps": 30,
    "optimizer.learning_rate": 1e-3,
    "train.prompts_per_batch": 16,
    "train.prompts_per_minibatch": 8,
}


def train(folder: Path, config: str, **settings: Any) -> list[dict[str, Any]]:
    """Trains in this process and returns the metrics."""
    changes = SMALL | {"workdir": folder, "mesh.num_devices": 1} | settings
    assert main.main([f"--config={ROOT}/{config}", *as_flags(changes)]) == 0
    return rows_of(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, caches: dict[str, Path]) -> Path:
    """Folder of the base policy. The runs read it from their cache."""
    require_sglang()
    folder = tmp_path_factory.mktemp("base") / "policy"
    flags = as_flags(SMALL | caches | {"mesh.num_devices": 1})
    assert fit_base([f"--config={ROOT / 'configs/polynomial.py'}", f"--output={folder}", *flags]) == 0
    return folder


@pytest.fixture(scope="module")
def servers(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SGLangServer]]:
    """Two servers of the base policy."""
    folder = tmp_path_factory.mktemp("servers")
    flags = ("--max-total-tokens", "32768", "--max-running-requests", "128", "--context-length", "64")
    started = [SGLangServer(base, folder / f"server-{i}.log", *flags) for i in range(2)]
    with running(started):
        yield started


@pytest.fixture
def served(servers: list[SGLangServer], caches: dict[str, Path]) -> dict[str, Any]:
    """Settings of a run with these servers."""
    return caches | {
        "rollouts.name": "sglang",
        "rollouts.urls": ",".join(server.url for server in servers),
        "rollouts.weights_dtype": "float32",
        "rollouts.max_concurrent": 128,
        "eval.every": 0,
    }


def test_training_with_servers_raises_the_reward(served, tmp_path):
    """GRPO, because its reward rises within a few steps."""
    settings = served | {"rollouts.weights_dir": tmp_path / "w", "train.num_steps": 20, "eval.every": 20}
    rows = train(tmp_path / "run", "configs/polynomial.py:grpo", **settings)
    assert [row["step"] for row in rows] == list(range(1, 21))
    # The log-probabilities of servers and trainer agree for every token.
    assert max(row["mismatch/max"] for row in rows) < 1e-3
    assert {row["response/staleness"] for row in rows} == {0.0}
    assert sum(row["rollouts/resampled"] + row["rollouts/server_failures"] for row in rows) == 0
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:3]) > 0.1
    assert not any((tmp_path / "w").glob("*"))  # The folder for weights has been removed.


def test_the_doctor_passes_servers_with_other_weights(servers, served, tmp_path):
    """The servers have weights of an earlier run, and those of this run afterwards."""
    settings = SMALL | served | {"workdir": tmp_path / "run", "rollouts.weights_dir": tmp_path / "w"}
    flags = [f"--config={ROOT / 'configs/polynomial.py'}", *as_flags(settings | {"mesh.num_devices": 1})]
    findings: list[Finding] = []
    run_command(config_parser(None), flags, lambda config, _: findings.extend(check_weights(RunContext(config))))
    found = {one.name: one for one in findings}
    for server in servers:
        one = found[f"server {server.url}"]
        assert one.status == "passed" and float(one.figures["mean difference"]) < 1e-4
    assert not any((tmp_path / "w").glob("*"))


def test_one_step_off_policy(served, tmp_path):
    require_torch()
    settings = served | {
        "train.num_steps": 3,
        "train.staleness": 1,
        "algo.importance_cap": 2.0,
        "rollouts.weight_sync": "tensor",
    }
    rows = train(tmp_path / "run", "configs/polynomial.py", **settings)
    assert [row["response/staleness"] for row in rows] == [0, 1, 1]
    # The weights of the sampler are current in the first step, and one step old in the others.
    assert rows[0]["mismatch/max"] < 1e-3 < min(row["mismatch/max"] for row in rows[1:])


def test_two_processes_share_servers(served, tmp_path):
    settings = served | {"rollouts.shared_servers": True, "rollouts.weights_dir": tmp_path / "w", "train.num_steps": 2}
    run = Run(tmp_path, "run", SMALL | settings, count=2)
    run.finish()
    rows = rows_of(run.folder)
    assert [row["step"] for row in rows] == [1, 2]
    # Both processes sampled all tokens with the current weights, which one of them pushed.
    assert max(row["mismatch/max"] for row in rows) < 1e-3
    assert {row["response/staleness"] for row in rows} == {0.0}
    assert sum(row["rollouts/resampled"] + row["rollouts/server_failures"] for row in rows) == 0
    assert min(row["policy/update_norm"] for row in rows) > 0 and not any((tmp_path / "w").glob("*"))


def test_evaluations_of_a_server_and_a_folder_agree(servers, base, tmp_path):
    """Greedy generations are equal, and the evaluation does not change the weights of the server."""
    url = servers[0].url
    weights = {"model_path": str(base), "weight_version": "of the folder"}  # Other tests have changed the weights.
    assert httpx.post(f"{url}/update_weights_from_disk", json=weights).json()["success"]
    flags = [f"--config={ROOT / 'configs/polynomial.py'}", "--benchmarks=polynomial", "--num_generations=2"]
    flags += [f"--models=folder={base},server={url}", f"--output={tmp_path}"]
    settings = {"task.options": SETTINGS["task.options"], "model.path": base, "sampling.temperature": 0.0}
    assert evaluate([*flags, *as_flags(settings | {"mesh.num_devices": 1})]) == 0
    responses = [
        [row["response"] for row in read_generations(tmp_path / "polynomial" / label)] for label in ("folder", "server")
    ]
    assert len(responses[0]) == 8 * 2 and responses[0] == responses[1]
    assert httpx.get(f"{url}/model_info").json()["weight_version"] == "of the folder"
