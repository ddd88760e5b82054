"""Runs `poly_epo_jax.main` with configs/smollm2.py:grpo, without evaluation. Child process of step_peers.py."""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import step_case
from peers import ROOT

from poly_epo_jax.records.run_folder import METRICS, TIMING, read_rows


def main() -> None:
    """Measures the steps of a run."""
    model, _ = step_case.arguments()
    num_steps = step_case.WARM_UPS + step_case.STEPS
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        overrides = {
            "workdir": workdir,
            "compilation_cache_dir": f"{folder}/compiled",
            "model.path": model,
            "sampling.max_tokens": step_case.MAX_TOKENS,
            "train.num_steps": num_steps,
            "train.num_generations": step_case.GENERATIONS,
            "train.prompts_per_batch": step_case.PROMPTS,
            "train.prompts_per_minibatch": step_case.PROMPTS,
            "optimizer.learning_rate": step_case.LEARNING_RATE,
            "optimizer.max_grad_norm": step_case.MAX_GRAD_NORM,
            "eval.every": 0,
            "checkpoint.every": num_steps,
        }
        # A separate process, because `main` configures the process before it imports JAX.
        command = [sys.executable, "-m", "poly_epo_jax.main", "--config=configs/smollm2.py:grpo"]
        command += [f"--config.{key}={value}" for key, value in overrides.items()]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
        seconds = [row["seconds/step"] for row in read_rows(workdir / TIMING) if row["step"]]
        rewards = [row["reward"] for row in read_rows(workdir / METRICS) if row["step"]]
    step_case.report(seconds, rewards, "embedded sampler, packed rows, prompts shared", resource.RUSAGE_CHILDREN)


if __name__ == "__main__":
    main()
