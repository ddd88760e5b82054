"""Writes fake study folders with the files of `python -m poly_epo_jax.study`."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.study.folder import RunKey

KEEPS = {"poly_epo": 6.4, "grpo": 1.2, "grpo_div": 6.4}
"""Final number of correct clusters@8 of each method. The first and the last method have overlapping points."""
NUM_STEPS = 20
VERSIONS = {"python": "3.12.3", "jax": "0.10.2", "commit": "0123456789ab"}


def write_fake_study(
    folder: Path,
    tasks: Sequence[str] = ("polynomial",),
    learning_rates: Sequence[float] = (1e-4, 5e-4),
    seeds: Sequence[int] = (0, 1, 2),
    evaluated: bool = False,
) -> list[RunKey]:
    """Writes a study with finished runs and returns their keys."""
    run_keys = [
        RunKey(task, method, rate, seed)
        for seed in seeds
        for task in tasks
        for rate in learning_rates
        for method in KEEPS
    ]
    folder.mkdir(parents=True, exist_ok=True)
    plan = {"baseline": "grpo", "runs": [dataclasses.asdict(run_key) for run_key in run_keys]}
    (folder / "study.json").write_text(json.dumps(plan))
    for run_key in run_keys:
        write_fake_run(folder, run_key)
        if evaluated:
            write_fake_evaluation(folder, run_key)
    attempts = [attempt(run_key) for run_key in run_keys]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in attempts))
    return run_keys


def attempt(run_key: RunKey, code: int = 0, error: str = "") -> dict[str, Any]:
    row = {"run": f"{run_key.task}/{run_key.name}", "stage": "train", "started": "2026-01-01T00:00:00+00:00"}
    return row | {"seconds": 60.5, "exit": code, "error": error}


def write_fake_run(folder: Path, run_key: RunKey, num_steps: int = NUM_STEPS) -> Path:
    """Writes a run with `num_steps` of `NUM_STEPS` steps, evaluated every 5 steps. Seeds affect all methods equally."""
    run = folder / run_key.task / run_key.name
    run.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(run_key.seed)
    luck = float(rng.normal(0, 0.02))
    rows = []
    for step in range(num_steps + 1):
        progress = step / NUM_STEPS
        row: dict[str, float | None] = {"step": step}
        if step % 5 == 0:
            clusters = 5 + (KEEPS[run_key.method] - 5) * progress
            reward = 0.7 + (0.2 if KEEPS[run_key.method] > 2 else 0.25) * progress + luck
            row |= {
                "eval/reward": reward,
                "eval/correct_clusters@8": clusters,
                "eval/correct_clusters@64": 2 * clusters,
            }
            row |= {f"eval/pass@{k}": 1 - (1 - reward) ** k for k in (1, 2, 4, 8)}
        if step:
            row |= {"reward": 0.6 + 0.3 * progress, "solved": 0.9, "clusters/correct": 4.0, "clusters/incorrect": 2.0}
            row |= {"train/ever_solved": 80.0 * step + run_key.seed, "data/with_signal": 30.0}
            row |= {"data/drawn": (48.0 if run_key.method == "grpo" else 32.0) + run_key.seed}
            row |= {"response/length": 11.9184, "response/truncated": 0.01, "policy/kl": 1e-4, "policy/entropy": 0.5}
            row |= {
                "policy/gradient_norm": None if step == 3 else 0.2,
                "clusters/synergy": 0.01,
                "policy/clip_fraction": 0.0,
            }
        rows.append(row)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    advantages = "grpo" if run_key.method == "grpo" else run_key.method
    config = {"seed": run_key.seed, "workdir": str(run), "eval": {"every": 5}}
    config |= {"train": {"num_steps": NUM_STEPS, "num_generations": 8}}
    config |= {"algo": {"advantages": advantages}, "optimizer": {"learning_rate": run_key.rate}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "about.json").write_text(json.dumps({"method": run_key.method, "versions": [VERSIONS]}))
    (run / "checkpoints" / str(num_steps)).mkdir(parents=True, exist_ok=True)
    return run


def write_fake_evaluation(folder: Path, run_key: RunKey, benchmark: str = "polynomial") -> None:
    path = folder / "evaluation" / benchmark / run_key.label
    path.mkdir(parents=True)
    estimate = {"mean": 0.5 + 0.01 * run_key.seed, "low": 0.4, "high": 0.6}
    metrics = {name: estimate for name in ("pass@1", "pass@2", "pass@8", "majority_accuracy@8", "correct_clusters@8")}
    branching = {"mean": np.linspace(1, KEEPS[run_key.method], 12).tolist()}
    (path / "results.json").write_text(json.dumps({"metrics": metrics, "branching": branching, "num_problems": 4}))
