"""Trains a policy: python -m poly_epo_jax.main --config=configs/polynomial.py:poly_epo --config.seed=1"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app
from grain import DatasetIterator
from jax.sharding import Mesh
from rich.console import Console

from poly_epo_jax import run_folder
from poly_epo_jax.algorithm import make_advantages, make_loss, method_title
from poly_epo_jax.base_policy import base_policy
from poly_epo_jax.checkpoint import Checkpoints
from poly_epo_jax.choices import make_judge, make_task
from poly_epo_jax.command_line import parse_flags, run_command
from poly_epo_jax.config import Config, ConfigError, changed_keys, microbatch_rows
from poly_epo_jax.data import Cleaned, drop_long_prompts, problem_batches
from poly_epo_jax.evaluation.held_out import evaluate_held_out
from poly_epo_jax.experience import Experience
from poly_epo_jax.grading import JudgeError
from poly_epo_jax.json_files import write_json
from poly_epo_jax.memory_plan.tables import print_plan
from poly_epo_jax.minibatches import MinibatchPacker
from poly_epo_jax.model.sharding import host_mesh, make_mesh
from poly_epo_jax.objective import Objective
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.mesh import check_mesh
from poly_epo_jax.parallel.stop import Stop
from poly_epo_jax.policy import Policy, find_model, open_policy
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.timeline import Timeline
from poly_epo_jax.tracking import NoTracker, Tracker
from poly_epo_jax.train import Schedule, Trained, Trainer, Unlogged, train
from poly_epo_jax.types import Judge, Metrics, Problem, Sampling, Task
from poly_epo_jax.update import PolicyUpdate

RESUME_MAY_CHANGE = (
    "workdir",
    "compilation_cache",
    "train.num_steps",
    "mesh.",
    "hosts.",
    "train.rows_per_device",
    "checkpoint.",
    "log.",
    "base.cache_dir",
    "model.path",
    "rollouts.",
    "judge.url",
    "judge.api_key_env",
    "judge.options.attempts",
    "judge.timeout_seconds",
    "judge.wait_seconds",
    "judge.max_concurrent",
    "judge.max_failed_share",
)


def run(config: Config) -> None:
    """Builds what the configuration describes, and trains it to the end.

    Raises:
      ValueError, OSError: the configuration cannot run; the message says why and what to do.
    """
    hosts.join(config.hosts)
    jax.config.update("jax_compilation_cache_dir", str(Path(config.compilation_cache).absolute()))
    with contextlib.ExitStack() as held:
        # One of the hosts holds it for all of them.
        hosts.on_first(lambda: held.enter_context(run_folder.in_use(Path(config.workdir))))
        _run(config)


def _run(config: Config) -> None:
    """What `run` does in a run folder of its own."""
    workdir = Path(config.workdir)
    _check_same_run(workdir, config)
    mesh = make_mesh(**config.mesh)
    here = host_mesh(mesh)
    task = make_task(config.task)
    if config.eval.every and not task.held_out_problems:
        raise ConfigError(f"eval.every={config.eval.every}, but the task holds out no problems; set eval.every=0.")
    judge = make_judge(config.judge, task)
    policy = _initial_policy(config, task, here)
    check_mesh(config.mesh, mesh.shape, dataclasses.asdict(policy.config), config.train.row_tokens)
    if hosts.is_first():
        print_plan(config, policy.config, Console(), brief=True)
        policy.save_description(workdir / run_folder.POLICY)
        write_json(workdir / run_folder.ABOUT, {"method": method_title(config.algo)})

    train_problems, held_out_problems = _problems_that_fit(task, policy, config, workdir)
    batches = problem_batches(train_problems, config.train.prompts_per_batch, config.seed)
    update = _policy_update(config, policy, mesh)
    checkpoints = Checkpoints(workdir / run_folder.CHECKPOINTS, config.checkpoint.keep)
    trained = _restored(checkpoints, update, batches)
    if trained is None:
        trained = Trained(0, update.init(policy.load_params(mesh)), batches.get_state())
    open_sampler = SAMPLERS[config.rollouts.name].open
    sampler = open_sampler(policy.model, here, policy.stop_ids, config, **config.rollouts.options)
    rollouts = Rollouts(sampler, policy.tokenizer, task, config.train.max_prompt_tokens)
    timeline, stop = Timeline(), Stop()
    trainer = Trainer(
        experience=_experience(config, rollouts, task, judge, batches, timeline, stop),
        advantages=make_advantages(config.algo, config.seed),
        packer=_packer(config, mesh),
        update=update,
        timeline=timeline,
        trained=trained,
        reference=policy.load_params(mesh) if config.algo.kl_coef else None,
        set_size=config.algo.set_size,
    )

    def evaluate() -> Awaitable[Metrics]:
        problems, sampling = held_out_problems[: config.eval.num_problems], _sampling(config, config.seed)
        return evaluate_held_out(rollouts, task, judge, problems, config.eval.num_generations, sampling, stop)

    # Without a checkpoint there is no step to resume from, not even the evaluation before the first.
    logged = trained.step if trained.unlogged is None else trained.step - 1
    with _tracker(config, logged if trained.step else -1) as tracker:
        try:
            asyncio.run(train(trainer, evaluate, checkpoints, tracker, _schedule(config)))
        finally:
            sampler.close()
    if hosts.is_first():
        print(f"Done: {workdir}. See it with: python -m poly_epo_jax.report {workdir}")


def _initial_policy(config: Config, task: Task, mesh: Mesh) -> Policy:
    """That of model.path or, where that is empty, the base policy, which one host makes."""
    if config.model.path:
        return open_policy(find_model(config.model.path), config.model)
    return open_policy(hosts.on_first(lambda: base_policy(config, task, mesh)), config.model)


def _policy_update(config: Config, policy: Policy, mesh: Mesh) -> PolicyUpdate:
    algo, train = config.algo, config.train
    objective = Objective(
        make_loss(algo),
        temperature=config.sampling.temperature,
        kl_coef=algo.kl_coef,
        entropy_coef=algo.entropy_coef,
        importance_cap=algo.importance_cap if algo.old_logprobs == "sampler" else None,
    )
    total_updates = train.num_steps * (train.prompts_per_batch // train.prompts_per_minibatch)
    return PolicyUpdate(policy.model, mesh, objective, config.optimizer, total_updates, train.trainable)


def _restored(checkpoints: Checkpoints, update: PolicyUpdate, batches: DatasetIterator) -> Trained | None:
    """Where the newest whole checkpoint stands, to which the data is moved; None without one."""
    newest = checkpoints.newest(lambda step: checkpoints.restore(step, update.abstract_state, update.shardings))
    if newest is None:
        return None
    step, (state, saved) = newest
    batches.set_state(saved["batches"])
    unlogged = None if saved["unlogged"] is None else Unlogged(**saved["unlogged"])
    return Trained(step, state, saved["batches"], unlogged)


def _experience(
    config: Config,
    rollouts: Rollouts,
    task: Task,
    judge: Judge,
    batches: DatasetIterator,
    timeline: Timeline,
    stop: Stop,
) -> Experience:
    def sampling(step: int) -> Sampling:
        """Another seed for every step, the same for every repetition of it."""
        return _sampling(config, int(np.random.SeedSequence([config.seed, step]).generate_state(1)[0]))

    return Experience(
        rollouts,
        task,
        judge,
        batches,
        config.train.num_generations,
        sampling,
        last_step=config.train.num_steps,
        staleness=config.train.staleness,
        max_failed_share=config.judge.max_failed_share,
        timeline=timeline,
        stop=stop,
    )


def _sampling(config: Config, seed: int) -> Sampling:
    return Sampling(**config.sampling, seed=seed)


def _packer(config: Config, mesh: Mesh) -> MinibatchPacker:
    return MinibatchPacker(
        config.train.prompts_per_minibatch,
        config.train.row_tokens,
        microbatch_rows(config.train, mesh.shape),
        config.algo.length_normalization,
        config.sampling.max_tokens,
    )


def _schedule(config: Config) -> Schedule:
    return Schedule(config.train.num_steps, config.eval.every, config.checkpoint.every, config.log.generations_every)


def _tracker(config: Config, resume_step: int) -> contextlib.AbstractContextManager[Tracker | NoTracker]:
    """One host logs."""
    if not hosts.is_first():
        return contextlib.nullcontext(NoTracker())
    json_config = json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"
    return Tracker(Path(config.workdir), json_config, config.train.num_steps, resume_step, config.log.wandb_project)


def _problems_that_fit(
    task: Task, policy: Policy, config: Config, workdir: Path
) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """The training and the held-out problems, but those with too long a prompt; data.json counts what was dropped."""
    counts, problems = {}, []
    for name, part in (("train", task.train_problems), ("held_out", task.held_out_problems)):
        kept, too_long = drop_long_prompts(part, policy.tokenizer, config.train.max_prompt_tokens)
        before = dataclasses.asdict(task.dropped[name]) if isinstance(task, Cleaned) else {}
        counts[name] = {"kept": len(kept), "dropped": before | {"too_long": too_long}}
        problems.append(kept)
        reasons = [f"{count} {reason.replace('_', ' ')}" for reason, count in counts[name]["dropped"].items() if count]
        if reasons and hosts.is_first():
            print(f"{name.replace('_', '-')} problems: {len(kept)}; dropped: {', '.join(reasons)}.")
    if hosts.is_first():
        write_json(workdir / run_folder.DATA, counts)
    train_problems, held_out_problems = problems
    return train_problems, held_out_problems


def _check_same_run(workdir: Path, config: Config) -> None:
    """Refuses to resume a run under settings that would make it another run."""
    saved = run_folder.resumable_config(workdir)
    if saved is None:
        return
    new = json.loads(json.dumps(config.to_dict()))
    unknown = changed_keys(_names(saved), _names(new))
    if unknown:
        raise ConfigError(
            f"{workdir} holds a run of another version of poly_epo_jax, whose keys differ in {', '.join(unknown)}; "
            "resume it with that version, or set --config.workdir to a new folder."
        )
    changed = [key for key in changed_keys(saved, new) if not key.startswith(RESUME_MAY_CHANGE)]
    if changed:
        raise ConfigError(
            f"{workdir} holds a run with another {', '.join(changed)}; set --config.workdir to a new folder, or delete "
            "that one."
        )


def _names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration without their values."""
    is_section = {key: isinstance(value, dict) and key != "options" for key, value in config.items()}
    return {key: _names(value) if is_section[key] else key for key, value in config.items()}


def main(argv: Sequence[str]) -> None:
    run_command(run, argv, JudgeError, hosts.HostError)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
