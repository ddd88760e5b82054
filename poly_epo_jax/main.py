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
from poly_epo_jax.algorithm import make_advantages, make_estimator, make_loss, method_title
from poly_epo_jax.base_policy import base_policy
from poly_epo_jax.checkpoint import Checkpoints
from poly_epo_jax.command_line import parse_flags, run_command
from poly_epo_jax.config import Config, ConfigError, changed_keys, microbatch_rows, updates_per_step
from poly_epo_jax.data import Cleaned, drop_long_prompts, problem_batches
from poly_epo_jax.evaluation.held_out import evaluate_held_out
from poly_epo_jax.experience import Experience
from poly_epo_jax.grading import JudgeError
from poly_epo_jax.json_files import write_json
from poly_epo_jax.memory_plan.tables import print_plan
from poly_epo_jax.minibatches import MinibatchPacker
from poly_epo_jax.model.sharding import host_mesh
from poly_epo_jax.objective import DivergenceError, Objective
from poly_epo_jax.optimizer import decays
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.stop import Stop
from poly_epo_jax.policy import Policy, find_model, open_policy
from poly_epo_jax.prepare import prepare
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.timeline import Timeline
from poly_epo_jax.tracking import NoTracker, Tracker
from poly_epo_jax.train import Schedule, Trained, Trainer, Unlogged, train
from poly_epo_jax.types import Judge, JudgeLoad, Metrics, Problem, Sampling, Task
from poly_epo_jax.update import PolicyUpdate

RESUME_MAY_CHANGE = (  # but for what `_bound` says
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
    _check_same_run(Path(config.workdir), config)
    mesh, task, judge = hosts.on_all(lambda: prepare(config))
    with contextlib.ExitStack() as held:
        # One of the hosts holds it for all of them.
        hosts.on_first(lambda: held.enter_context(run_folder.in_use(Path(config.workdir))))
        _run(config, mesh, task, judge)


def _run(config: Config, mesh: Mesh, task: Task, judge: Judge) -> None:
    """What `run` does in a run folder of its own."""
    workdir = Path(config.workdir)
    here = host_mesh(mesh)
    policy = _initial_policy(config, task, here)
    if hosts.is_first():
        print_plan(config, policy.config, Console(), brief=True)
        policy.save_description(workdir / run_folder.POLICY)
        write_json(workdir / run_folder.ABOUT, {"method": method_title(config.algo)})

    train_problems, held_out_problems = _problems_that_fit(task, policy, config, workdir)
    if config.eval.every and not held_out_problems:
        raise ConfigError(
            f"train.max_prompt_tokens={config.train.max_prompt_tokens} leaves out every held-out problem; raise it, or "
            "set eval.every=0."
        )
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
        importance_cap=algo.importance_cap,
        max_mismatch=algo.max_mismatch,
    )
    total_updates = train.num_steps * updates_per_step(train)
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
        reads_judge=make_estimator(config.algo).reads_judge,
        max_failed_share=config.judge.max_failed_share,
        timeline=timeline,
        judge_load=JudgeLoad(
            max(config.train.num_generations, config.eval.num_generations if config.eval.every else 0),
            config.train.max_prompt_tokens,
            config.sampling.max_tokens,
        ),
        stop=stop,
    )


def _sampling(config: Config, seed: int) -> Sampling:
    return Sampling(**config.sampling, seed=seed)


def _packer(config: Config, mesh: Mesh) -> MinibatchPacker:
    return MinibatchPacker(
        updates_per_step(config.train),
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
    bound = _bound(config)
    changed = [key for key in changed_keys(saved, new) if key in bound or not key.startswith(RESUME_MAY_CHANGE)]
    if changed:
        reasons = [f"{key} ({bound[key]})" if key in bound else key for key in changed]
        raise ConfigError(
            f"{workdir} holds a run with another {', '.join(reasons)}; set that back, set --config.workdir to a new "
            "folder, or delete that one."
        )


def _bound(config: Config) -> dict[str, str]:
    """Keys of RESUME_MAY_CHANGE that this run may not change, and why."""
    bound = {}
    if decays(config.optimizer):
        bound["train.num_steps"] = f"over which optimizer.schedule={config.optimizer.schedule} lowers the learning rate"
    if config.algo.kl_coef:
        bound["model.path"] = f"from whose policy algo.kl_coef={config.algo.kl_coef:g} measures the distance"
    return bound


def _names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration without their values."""
    is_section = {key: isinstance(value, dict) and key != "options" for key, value in config.items()}
    return {key: _names(value) if is_section[key] else key for key, value in config.items()}


def main(argv: Sequence[str]) -> None:
    run_command(run, argv, JudgeError, DivergenceError, hosts.HostError)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
