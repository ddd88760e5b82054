"""Trains a policy: python -m poly_epo_jax.main --config=configs/polynomial.py:poly_epo --config.seed=1"""

import gc

from poly_epo_jax.system.malloc import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory()  # before the imports below start threads
    gc.disable()  # what they make stays, and searching it again and again takes a tenth of their time

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path

import jax
import numpy as np
from grain import DatasetIterator
from jax.sharding import Mesh
from rich.console import Console

from poly_epo_jax.config.keys import Config, ConfigError, longest_sequence, updates_per_step
from poly_epo_jax.evaluate.held_out import evaluate_held_out
from poly_epo_jax.experience import Experience
from poly_epo_jax.memory_plan.tables import print_plan
from poly_epo_jax.model.attention import SHARES_PROMPTS, fastest
from poly_epo_jax.model.attention.self_check import CHECKED, trust_attention
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.model.policy import Policy, find_model, open_policy
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.sharding import host_mesh
from poly_epo_jax.records import run_folder
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.records.tracking import Tracker
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.grading import JudgeError
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import drop_long_prompts, problem_batches
from poly_epo_jax.startup.base_policy import base_policy
from poly_epo_jax.startup.command_line import config_parser, run_command
from poly_epo_jax.startup.prepare import model_shape, prepare
from poly_epo_jax.startup.resume_checks import check_same_model, check_same_run
from poly_epo_jax.step.advantages import make_advantages, make_estimator, method_title, skips_zero_advantages
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.objective import DivergenceError
from poly_epo_jax.step.packing import make_pack
from poly_epo_jax.step.update import PolicyUpdate, make_update
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.system.signals import Stop
from poly_epo_jax.system.versions import versions, versions_used
from poly_epo_jax.tasks.problems import Cleaned
from poly_epo_jax.train import Schedule, Trained, Trainer, Unlogged, train
from poly_epo_jax.types import Judge, JudgeLoad, Metrics, Problem, Sampling, Task


def run(config: Config, stop: Stop | None = None) -> None:
    """Builds what the configuration describes, and trains it to the end or until `stop` is asked to stop it.

    Raises:
      ValueError, OSError: the configuration cannot run; the message says why and what to do.
    """
    stop = stop or Stop()
    with contextlib.ExitStack() as held:
        hosts.join(config.hosts)
        jax.config.update("jax_compilation_cache_dir", str(Path(config.compilation_cache).absolute()))
        check_same_run(Path(config.workdir), config)
        mesh, task, judge = hosts.on_all(lambda: prepare(config))
        # One host holds the run folder for all of them.
        hosts.on_first(lambda: held.enter_context(run_folder.in_use(Path(config.workdir))))
        _run(config, mesh, task, judge, stop)


def _run(config: Config, mesh: Mesh, task: Task, judge: Judge, stop: Stop) -> None:
    """What `run` does once it holds the run folder."""
    workdir = Path(config.workdir)
    here = host_mesh(mesh)
    trust_attention(config.model.attention, model_shape(config), mesh, Path(config.compilation_cache) / CHECKED)
    policy = _initial_policy(config, task, here)
    hosts.on_all(lambda: check_same_model(workdir, policy.path))
    if hosts.is_first():
        print_plan(config, policy.config, Console(), brief=True)
    train_problems, held_out_problems = _problems_that_fit(task, policy, config, workdir)
    if config.eval.every and not held_out_problems:
        raise ConfigError(
            f"train.max_prompt_tokens={config.train.max_prompt_tokens} leaves out every held-out problem; raise it, or "
            "set eval.every=0."
        )
    batches = problem_batches(train_problems, config.train.prompts_per_batch, config.seed)
    update = make_update(config, policy.model, mesh)
    checkpoints = Checkpoints(
        workdir / run_folder.CHECKPOINTS, config.checkpoint.keep, with_frozen=not config.lora.rank
    )
    trained = _restored_or_new(config, policy, mesh, update, checkpoints, batches)
    hosts.on_first(lambda: _describe(config, policy))
    open_sampler = SAMPLERS[config.rollouts.name].open
    sampler = open_sampler(policy.model, here, policy.stop_ids, config, **config.rollouts.options)
    rollouts = Rollouts(sampler, policy.tokenizer, task, config.train.max_prompt_tokens, config.model.stop_strings)
    timeline = Timeline()
    trainer = Trainer(
        experience=_experience(config, rollouts, task, judge, batches, timeline, stop),
        advantages=make_advantages(config.algo, config.seed),
        packer=_packer(config, mesh),
        update=update,
        timeline=timeline,
        trained=trained,
        reference=policy.load_reference(mesh, config.seed) if config.algo.kl_coef else None,
        set_size=config.algo.set_size,
    )

    def evaluate() -> Awaitable[Metrics]:
        problems, sampling = held_out_problems[: config.eval.num_problems], _sampling(config, config.seed)
        return evaluate_held_out(rollouts, task, judge, problems, config.eval.num_generations, sampling, stop)

    # Without a checkpoint there is no step to resume from, not even the evaluation before the first.
    logged = trained.step if trained.unlogged is None else trained.step - 1
    with hosts.on_all(lambda: _tracker(config, logged if trained.step else -1)) as tracker:
        try:
            asyncio.run(train(trainer, evaluate, checkpoints, tracker, _schedule(config)))
        finally:
            sampler.close()
    if hosts.is_first():
        print(f"Done: {workdir}. See it with: python -m poly_epo_jax.report {workdir}")


def _describe(config: Config, policy: Policy) -> None:
    """Writes what the run trains, and how: now, as a resumed run has its own policy."""
    workdir = Path(config.workdir)
    policy.save_description(workdir / run_folder.POLICY)
    about = {"method": method_title(config.algo), "remat": policy.config.remat}
    base = {"base": str(policy.path.absolute())} if config.lora.rank else {}
    file = workdir / run_folder.ABOUT
    write_json(file, about | base | {"versions": versions_used(file, versions())})


def _initial_policy(config: Config, task: Task, mesh: Mesh) -> Policy:
    """The policy in model.path or, if that is empty, the base policy, which one host makes.

    One host also decides what model.remat=auto stands for, so that all run the same program.
    """
    section = dataclasses.replace(config.model, remat=hosts.on_first(lambda: model_shape(config).remat))
    if config.model.path:
        folder = find_model(config.model.path)
    else:
        folder = hosts.on_first(lambda: base_policy(config, task, mesh))
    return open_policy(folder, section, longest_sequence(config), config.lora)


def _restored_or_new(
    config: Config,
    policy: Policy,
    mesh: Mesh,
    update: PolicyUpdate,
    checkpoints: Checkpoints,
    batches: DatasetIterator,
) -> Trained:
    """The newest intact checkpoint, with `batches` moved to its position; without one, the start of training."""
    base = policy.load_base(mesh) if config.lora.rank else None  # which checkpoints do not hold
    newest = checkpoints.newest(lambda step: checkpoints.restore(step, update.abstract_state, update.shardings, base))
    if newest is None:
        return Trained(0, update.init(policy.load_params(mesh, config.seed, base)), batches.get_state())
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
        """A different seed for every step, the same whenever that step is repeated."""
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
        make_pack(config, mesh.shape, fastest(config.model.attention) in SHARES_PROMPTS),
        config.algo.length_normalization,
        config.sampling.max_tokens,
        longest_sequence(config),
        skip_silent=skips_zero_advantages(config.algo),
    )


def _schedule(config: Config) -> Schedule:
    return Schedule(config.train.num_steps, config.eval.every, config.checkpoint.every, config.log.generations_every)


def _tracker(config: Config, resume_step: int) -> contextlib.AbstractContextManager[Tracker | None]:
    """Only one host logs."""
    if not hosts.is_first():
        return contextlib.nullcontext()
    json_config = json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"
    return Tracker(Path(config.workdir), json_config, config.train.num_steps, resume_step, config.log.wandb_project)


def _problems_that_fit(
    task: Task, policy: Policy, config: Config, workdir: Path
) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """The training and held-out problems whose prompts are not too long; data.json counts what was dropped."""
    counts, problems = {}, []
    for name, part in (("train", task.train_problems), ("held_out", task.held_out_problems)):
        kept, too_long = drop_long_prompts(part, policy.tokenizer, config.train.max_prompt_tokens)
        before = dataclasses.asdict(task.dropped[name]) if isinstance(task, Cleaned) else {}
        counts[name] = {"kept": len(kept), "dropped": before | {"too_long": too_long}}
        problems.append(kept)
        reasons = [f"{count} {reason.replace('_', ' ')}" for reason, count in counts[name]["dropped"].items() if count]
        if reasons and hosts.is_first():
            print(f"{name.replace('_', '-')} problems: {len(kept)}; dropped: {', '.join(reasons)}.")
    hosts.on_first(lambda: write_json(workdir / run_folder.DATA, counts))
    train_problems, held_out_problems = problems
    return train_problems, held_out_problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code."""
    errors = (JudgeError, DivergenceError, hosts.HostError)
    return run_command(config_parser(__doc__), arguments, lambda config, _: run(config), *errors)


if __name__ == "__main__":
    gc.enable()
    sys.exit(main())
