"""Trains the tiny policy in this process, with components that a test supplies."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from fakes import PROBLEMS, TINY_MODEL, ByLetter, LetterJudge, RandomLetters, on_mesh, tiny_params

from poly_epo_jax.config import default
from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.section import read_section
from poly_epo_jax.evaluate.held_out import evaluate_held_out
from poly_epo_jax.experience import Experience
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.parallel.sharding import make_mesh, param_shardings
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.records.tracking import Tracker
from poly_epo_jax.rollouts.prompts import problem_batches
from poly_epo_jax.set_rl import Loss
from poly_epo_jax.step.advantages import Features, make_advantages, make_estimator, make_loss
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.packing import pack
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.system.signals import StopSignal
from poly_epo_jax.train import Trainer, TrainProgress, TrainSchedule, train
from poly_epo_jax.types import Judge, Metrics, Params, Sampling, Task


def tiny_config(**changes: Any) -> Config:
    config = default.get_config()
    config.update_from_flattened_dict(
        {
            "train.num_steps": 2,
            "judge.max_failed_fraction": 1.0,
            "checkpoint.every": 1,
            "eval.every": 2,
            "optimizer.learning_rate": 1e-2,
            "optimizer.schedule": "constant",
            "optimizer.end_lr_fraction": 0.0,
            "optimizer.max_grad_norm": 1.0,
        }
        | changes
    )
    return read_section(Config, config.to_dict())


def train_tiny(
    run_dir: Path,
    failing: Sequence[str] = (),
    sampler: RandomLetters | None = None,
    *,
    task: Task | None = None,
    judge: Judge | None = None,
    params: Params | None = None,
    loss: Loss | None = None,
    advantages: Callable[[int, Features], np.ndarray] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Params, Params]:
    """Trains the tiny policy, for two steps by default.

    Args:
      run_dir: The run folder.
      failing: Ids of the problems on which the default judge fails.
      sampler: The sampler. If None, random letters.
      task: The task. If None, `ByLetter`.
      judge: The judge. If None, `LetterJudge`.
      params: Initial weights. If None, `tiny_params()`.
      loss: The loss. If None, the configured loss.
      advantages: The estimator. If None, the configured estimator.
      changes: Changes of the configuration.

    Returns:
      The initial weights, and the weights in the checkpoint of the last step.
    """
    config, mesh = tiny_config(**(changes or {})), make_mesh(1, 1, 1)
    algo, num_steps, first = config.algo, config.train.num_steps, params or tiny_params()
    objective = UpdateObjective(loss or make_loss(algo), config.sampling.temperature, algo.kl_coef, algo.entropy_coef)
    update = PolicyUpdate(TINY_MODEL, mesh, objective, config.optimizer, total_updates=2 * num_steps)
    task, judge, batches = task or ByLetter(), judge or LetterJudge(failing), problem_batches(PROBLEMS, 3, seed=0)
    rollouts, timeline, num_generations = (sampler or RandomLetters()).rollouts(task), Timeline(), 8
    stop = StopSignal()
    trainer = Trainer(
        experience=Experience(
            *(rollouts, task, judge, batches, num_generations),
            lambda step: Sampling(2, seed=step),
            last_step=num_steps,
            staleness=config.train.staleness,
            reads_judge=make_estimator(algo).reads_judge,
            max_failed_fraction=config.judge.max_failed_fraction,
            timeline=timeline,
            stop=stop,
        ),
        advantages=advantages or make_advantages(algo, seed=0),
        packer=MinibatchPacker(2, partial(pack, row_tokens=8, rows_per_microbatch=4), "max", max_tokens=2),
        update=update,
        timeline=timeline,
        progress=TrainProgress(0, update.init(first), batches.get_state()),
        reference=on_mesh(tiny_params(), mesh) if algo.kl_coef else None,
        set_size=algo.set_size,
    )
    schedule = TrainSchedule(num_steps, config.eval.every, config.checkpoint.every, log_generations=1)

    def evaluate() -> Awaitable[Metrics]:
        return evaluate_held_out(rollouts, task, judge, task.held_out_problems, 2, Sampling(2), stop)

    with Tracker(run_dir, "{}", num_steps, -1) as tracker:
        asyncio.run(train(trainer, evaluate, Checkpoints(run_dir / "checkpoints"), tracker, schedule))
    return first, saved(run_dir, num_steps)


def saved(run_dir: Path, step: int) -> Params:
    """Returns the weights of a checkpoint."""
    mesh = make_mesh(1, 1, 1)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny_params())
    return Checkpoints(run_dir / "checkpoints").restore_params(step, abstract, param_shardings(TINY_MODEL, mesh))
