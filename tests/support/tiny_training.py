"""Trains the tiny policy in this process, with components that a test supplies."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from fakes import PROBLEMS, TINY_MODEL, ByLetter, LetterJudge, RandomLetters, on_mesh, tiny_params

from poly_epo_jax.config import default
from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.section import read_section
from poly_epo_jax.evaluate.held_out import evaluate_held_out
from poly_epo_jax.experience import Experience
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.parallel.sharding import make_mesh, param_shardings
from poly_epo_jax.records.run_folder import is_evaluated
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.records.tracking import Tracker
from poly_epo_jax.rollouts.prompts import ProblemOrder
from poly_epo_jax.set_rl import Loss
from poly_epo_jax.step.advantages import AdvantageFunction, make_advantages, make_loss
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.packing import pack
from poly_epo_jax.step.truncation import Truncation
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.train import Trainer, TrainProgress, train
from poly_epo_jax.types import Judge, Metrics, Params, Problem, Sampling, Task


def tiny_config(**changes: Any) -> Config:
    config = default.get_config()
    config.update_from_flattened_dict(
        {
            "train.num_steps": 2,
            "train.prompts_per_batch": 3,
            "judge.max_failed_fraction": 1.0,
            "checkpoint.every": 1,
            "log.generations_every": 1,
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
    update: PolicyUpdate | None = None,
    advantages: AdvantageFunction | None = None,
    changes: Mapping[str, Any] | None = None,
    audit: Callable[[int, Sequence[Row]], None] | None = None,
) -> tuple[Params, Params]:
    """Trains the tiny policy, for two steps by default. Continues from the last checkpoint in the run folder, if any.

    Args:
      run_dir: The run folder.
      failing: Ids of the problems on which the default judge fails.
      sampler: The sampler. If None, random letters.
      task: The task. If None, `ByLetter`.
      judge: The judge. If None, `LetterJudge`.
      params: Initial weights. If None, `tiny_params()`.
      loss: The loss. If None, the configured loss.
      update: The update, so that several runs can share its compiled programs. If None, `tiny_update` of `loss`.
      advantages: The estimator. If None, the configured estimator.
      changes: Changes of the configuration.
      audit: Starts the audit of a step, see `train`.

    Returns:
      The initial weights, and the weights in the checkpoint of the last step.
    """
    config, mesh = tiny_config(**(changes or {})), make_mesh(1, 1, 1)
    algo, num_steps, first = config.algo, config.train.num_steps, params or tiny_params()
    update = update or tiny_update(config, loss)
    task, judge = task or ByLetter(), judge or LetterJudge(failing)
    experience = tiny_experience(config, sampler, task, judge, advantages)
    rollouts, stop, checkpoints = experience.rollouts, experience.stop, Checkpoints(run_dir / "checkpoints")
    newest = checkpoints.restore_latest(lambda step: checkpoints.restore(step, update.abstract_state, update.shardings))
    progress = TrainProgress(0, update.init(first), position=0, solved=0)
    if newest is not None:
        step, (state, data) = newest
        progress = TrainProgress(step, state, data["position"], int(data["solved"], 16), data["ahead"])
    trainer = Trainer(
        experience=experience,
        truncation=Truncation(algo.truncated, max_tokens=2, coef=algo.overlong_penalty),
        packer=MinibatchPacker(2, partial(pack, row_tokens=8, rows_per_microbatch=4), "max", max_tokens=2),
        update=update,
        timeline=experience.timeline,
        progress=progress,
        reference=on_mesh(tiny_params(), mesh) if algo.kl_coef else None,
        set_size=algo.set_size,
        positions={problem.id: position for position, problem in enumerate(PROBLEMS)},
    )

    def evaluate() -> Awaitable[Metrics]:
        return evaluate_held_out(rollouts, task, judge, task.held_out_problems, 2, Sampling(2), stop)

    with Tracker(run_dir, "{}", num_steps, progress.step or -1) as tracker:
        was_evaluated = is_evaluated(run_dir, progress.step)
        asyncio.run(train(trainer, evaluate, checkpoints, tracker, config, was_evaluated, audit))
    return first, saved(run_dir, num_steps)


def tiny_experience(
    config: Config,
    sampler: RandomLetters | None = None,
    task: Task | None = None,
    judge: Judge | None = None,
    advantages: AdvantageFunction | None = None,
    problems: Sequence[Problem] = PROBLEMS,
) -> Experience:
    """Returns the source of the batches of `train_tiny`."""
    task = task or ByLetter()
    return Experience(
        (sampler or RandomLetters()).rollouts(task),
        task,
        judge or LetterJudge(),
        ProblemOrder(problems, config.train.prompts_per_batch, seed=0),
        advantages or make_advantages(config.algo, seed=0),
        lambda step: Sampling(2, seed=step),
        config,
        Timeline(),
    )


def tiny_update(config: Config, loss: Loss | None = None) -> PolicyUpdate:
    """Returns the update of the tiny policy with a loss. If `loss` is None, it is the configured loss."""
    algo = config.algo
    objective = UpdateObjective(loss or make_loss(algo), config.sampling.temperature, algo.kl_coef, algo.entropy_coef)
    total_updates = 2 * config.train.num_steps
    return PolicyUpdate(TINY_MODEL, make_mesh(1, 1, 1), objective, config.optimizer, total_updates)


def saved(run_dir: Path, step: int) -> Params:
    """Returns the weights of a checkpoint."""
    mesh = make_mesh(1, 1, 1)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny_params())
    return Checkpoints(run_dir / "checkpoints").restore_params(step, abstract, param_shardings(TINY_MODEL, mesh))
