"""Runs steps of configs/smollm2.py:grpo, from sampling to the update, without evaluation: a child of step_peers.py."""

import tempfile
from pathlib import Path

import step_case

from configs import smollm2
from poly_epo_jax.choices import read_config
from poly_epo_jax.main import run
from poly_epo_jax.run_folder import METRICS, TIMING, read_rows


def main() -> None:
    model, _ = step_case.arguments()
    config = smollm2.get_config("grpo")
    config.model.path = model
    config.train.num_steps = step_case.WARM_UPS + step_case.STEPS
    config.train.num_generations = step_case.GENERATIONS
    config.train.prompts_per_batch = config.train.prompts_per_minibatch = step_case.PROMPTS
    config.sampling.max_tokens = step_case.MAX_TOKENS
    config.optimizer.learning_rate = step_case.LEARNING_RATE
    config.optimizer.max_grad_norm = step_case.MAX_GRAD_NORM
    config.eval.every = 0
    with tempfile.TemporaryDirectory() as folder:
        config.workdir, config.compilation_cache = f"{folder}/run", f"{folder}/compiled"
        config.checkpoint.every = config.train.num_steps
        run(read_config(config))
        seconds = [row["seconds/step"] for row in read_rows(Path(config.workdir) / TIMING) if row["step"]]
        rewards = [row["reward"] for row in read_rows(Path(config.workdir) / METRICS) if row["step"]]
    step_case.report(seconds, rewards, "embedded sampler, packed rows, prompts shared")


if __name__ == "__main__":
    main()
