"""Trains a policy: python -m poly_epo_jax.main --config=configs/polynomial.py:poly_epo --config.seed=1"""

import gc

from poly_epo_jax.system.malloc import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory()  # before the imports below start threads
    # Objects created by imports are long-lived; collecting garbage while importing takes 10% of the import time, and
    # later collections would read these objects again and again.
    gc.disable()

import contextlib
import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from poly_epo_jax.audit.background import BackgroundAudit, check_inflation
from poly_epo_jax.config.keys import Config, ConfigError, max_sequence_tokens, updates_per_step
from poly_epo_jax.evaluate.held_out import evaluate_held_out
from poly_epo_jax.experience import Experience
from poly_epo_jax.memory_plan.tables import print_plan
from poly_epo_jax.model.attention import SUPPORTS_SHARED_PROMPTS, resolve_implementation
from poly_epo_jax.model.attention.self_check import CHECKED, verify_attention_kernel
from poly_epo_jax.model.checkpoint import Checkpoints, best_step
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.policy import Policy, check_stop_ids, find_model, open_policy
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.devices import find_devices
from poly_epo_jax.parallel.sharding import host_mesh
from poly_epo_jax.records import run_folder
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.records.tracking import Tracker, check_loggers
from poly_epo_jax.rollouts import SAMPLERS, pushed_dtype
from poly_epo_jax.rollouts.between_turns import warn_about_turns
from poly_epo_jax.rollouts.grading import EpisodeError, JudgeError
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import ProblemOrder, drop_long_prompts, with_system_prompt
from poly_epo_jax.startup.base_policy import base_policy
from poly_epo_jax.startup.command_line import config_parser, run_command
from poly_epo_jax.startup.prepare import Prepared, configure_compiler, prepare
from poly_epo_jax.startup.resume_checks import (
    check_resume_config,
    check_resume_inputs,
    check_resume_model,
    check_same_content,
    policy_digests,
    reference_digests,
)
from poly_epo_jax.step.advantages import make_advantages, method_title, skips_zero_advantages
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.objective import DivergenceError
from poly_epo_jax.step.packing import make_pack
from poly_epo_jax.step.truncation import make_truncation
from poly_epo_jax.step.update import PolicyUpdate, make_update
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.system.signals import StopSignal, run_in_loop
from poly_epo_jax.system.versions import versions, versions_used
from poly_epo_jax.tasks.problems import reasons_text, source_weights, usable_problems
from poly_epo_jax.train import Trainer, TrainProgress, train
from poly_epo_jax.types import Metrics, Problem, Sampling, Task


def run(config: Config) -> None:
    """Trains a policy as configured, until the last step or until a shutdown is requested.

    Args:
      config: The configuration.

    Raises:
      ValueError, OSError: If the run cannot start or continue. The message states the reason and the remedy.
      JudgeError, DivergenceError, HostError: If training fails, see `train.train`.
      SystemExit: If a shutdown is requested during training.
    """
    workdir = Path(config.workdir)
    with contextlib.ExitStack() as held:
        hosts.join(config.hosts)
        find_devices()
        hosts.run_on_first(lambda: check_loggers(config.log.projects))
        configure_compiler(config)
        check_resume_config(workdir, config)
        hosts.run_on_first(lambda: check_inflation(config))
        prepared = hosts.run_on_all(lambda: prepare(config))
        # The first process locks the run folder for all processes.
        hosts.run_on_first(lambda: held.enter_context(run_folder.lock_run_folder(workdir)))
        _run(config, prepared)
    if hosts.is_first():
        print(f"Done: {workdir}.{_best(config)} Create a report with: python -m poly_epo_jax.report {workdir}")


def _best(config: Config) -> str:
    """Returns a sentence about the best checkpoint of a run, or an empty string without `checkpoint.best`."""
    metric, workdir = config.checkpoint.best, Path(config.workdir)
    values = run_folder.held_out_values(workdir, metric)
    step = best_step(values, run_folder.checkpoint_steps(workdir))
    found = f"step {step}, {metric} {values[step]:.3f}" if step else f"none has a value of {metric}"
    return f" Best checkpoint: {found}." if metric else ""


def _run(config: Config, prepared: Prepared) -> None:
    """Trains while the run folder is locked."""
    workdir, mesh, task = Path(config.workdir), prepared.mesh, prepared.task
    local_mesh = host_mesh(mesh)
    policy = _initial_policy(config, prepared, local_mesh)
    digests = prepared.digests | _same_content(config, policy, policy_digests(policy))
    if hosts.is_first():
        print_plan(prepared.plan, prepared.rows_that_fit, Console(), brief=True)
    train_problems, held_out_problems = _problems_that_fit(config, task, policy)
    update = make_update(config, policy.model, mesh)
    checkpoints = Checkpoints(
        workdir / run_folder.CHECKPOINTS, config.checkpoint.keep, base=policy.path if config.lora.rank else None
    )
    progress = _restored_or_new(config, policy, mesh, update, checkpoints)
    reference = policy.load_reference(mesh, config.seed) if config.algo.kl_coef else None
    if reference is not None and not config.lora.rank:  # checkpoints of adapters identify the frozen weights
        digests |= _same_content(config, policy, reference_digests(reference))
    digests |= check_resume_inputs(config, prepared.judge)
    hosts.run_on_first(lambda: _write_description(config, policy, digests, prepared.code))

    rollouts = _open_rollouts(config, policy, task, local_mesh)
    hosts.run_on_first(lambda: warn_about_turns(policy.tokenizer, policy.stop_ids, task, train_problems))
    timeline, stop = Timeline(), StopSignal()
    trainer = Trainer(
        experience=Experience(
            rollouts,
            task,
            prepared.judge,
            ProblemOrder(train_problems, config.train.prompts_per_batch, config.seed, source_weights(task)),
            make_advantages(config.algo, config.seed),
            partial(_sampling, config),
            config,
            timeline,
            stop,
        ),
        truncation=make_truncation(config),
        packer=_packer(config, prepared.model_config, mesh),
        update=update,
        timeline=timeline,
        progress=progress,
        reference=reference,
        set_size=config.algo.set_size,
        positions={problem.id: position for position, problem in enumerate(train_problems)},
        pushed_dtype=pushed_dtype(config, policy.config),
    )
    evaluate = _evaluation(config, prepared, rollouts, held_out_problems, stop)
    step = progress.step
    with hosts.run_on_all(lambda: _tracker(config, step)) as tracker:
        is_evaluated = hosts.run_on_first(lambda: run_folder.is_evaluated(workdir, step))
        audit = BackgroundAudit(config, task, stop) if config.audit.every and tracker else None
        try:
            run_in_loop(
                train(trainer, evaluate, checkpoints, tracker, config, is_evaluated, audit and audit.submit), stop
            )
        finally:
            if audit is not None:
                is_complete = trainer.progress is not None and trainer.progress.step == config.train.num_steps
                audit.close(config.audit.wait_seconds if is_complete else 0.0)
            rollouts.sampler.close()
            trainer.progress = trainer.reference = None  # a kept exception may hold the trainer in a closure


def _open_rollouts(config: Config, policy: Policy, task: Task, mesh: Mesh) -> Rollouts:
    """Opens the sampler, and returns the rollouts that use it."""
    sampler = SAMPLERS[config.rollouts.name].open(
        policy.model, mesh, policy.stop_ids, config, **config.rollouts.options
    )
    limits = (config.train.max_prompt_tokens, config.model.stop_strings, policy.config.vocab_size)
    return Rollouts(sampler, policy.tokenizer, task, *limits, *config.rollouts.user_code_limits)


def _evaluation(
    config: Config, prepared: Prepared, rollouts: Rollouts, problems: Sequence[Problem], stop: StopSignal
) -> Callable[[], Awaitable[Metrics]]:
    """Returns a function that evaluates the policy on the first held-out problems."""
    sampling = Sampling(**{**config.sampling, "correlated": False}, seed=config.seed)  # pass@k assumes independence
    return partial(
        evaluate_held_out,
        rollouts,
        prepared.task,
        prepared.judge,
        problems[: config.eval.num_problems],
        config.eval.num_generations,
        sampling,
        stop,
    )


def _same_content(config: Config, policy: Policy, digests: dict[str, str]) -> dict[str, str]:
    """Checks on all processes that the content of the policy's folder is the same as at the start of the run."""
    return hosts.run_on_all(lambda: check_same_content(Path(config.workdir), str(policy.path), digests))


def _write_description(config: Config, policy: Policy, digests: dict[str, str], code: dict[str, Any]) -> None:
    """Writes about.json and the policy's tokenizer and configuration to the run folder."""
    workdir = Path(config.workdir)
    policy.save_description(workdir / run_folder.POLICY)
    about: dict[str, Any] = {"method": method_title(config.algo), "remat": policy.config.remat} | code
    base = {"base": str(policy.path.absolute())} if config.lora.rank else {}
    file = workdir / run_folder.ABOUT
    saved = run_folder.read_about(workdir).get("digests", {}) if run_folder.resumable_config(workdir) else {}
    about |= {"digests": digests | saved}
    write_json(file, about | base | {"versions": versions_used(file, versions())})


def _initial_policy(config: Config, prepared: Prepared, mesh: Mesh) -> Policy:
    """Opens the policy of `model.path`, after a check of the attention kernel.

    If `model.path` is empty, the first process fits or loads the base policy. The first process also determines
    `remat`, so that all processes compile the same program.
    """
    verify_attention_kernel(
        config.model.attention, prepared.model_config, prepared.mesh, Path(config.compilation_cache_dir) / CHECKED
    )
    section = dataclasses.replace(config.model, remat=hosts.run_on_first(lambda: prepared.model_config.remat))
    folder = (
        find_model(config.model.path)
        if config.model.path
        else hosts.run_on_first(lambda: base_policy(config, prepared.task, mesh))
    )
    policy = open_policy(folder, section, max_sequence_tokens(config), config.lora)
    check_stop_ids(policy)
    hosts.run_on_all(lambda: check_resume_model(Path(config.workdir), policy.path))
    return policy


def _restored_or_new(
    config: Config, policy: Policy, mesh: Mesh, update: PolicyUpdate, checkpoints: Checkpoints
) -> TrainProgress:
    """Returns the progress of the newest valid checkpoint, or that of a new run if there is none."""
    base = policy.load_base(mesh) if config.lora.rank else None  # checkpoints of adapters omit the frozen weights
    newest = checkpoints.restore_latest(
        partial(checkpoints.restore, like=update.abstract_state, shardings=update.shardings, frozen=base)
    )
    if newest is None:
        return TrainProgress(0, update.init(policy.load_params(mesh, config.seed, base)), position=0, solved=0)
    step, (state, saved) = newest
    if not {"position", "solved", "ahead"} <= saved.keys():
        raise ConfigError(
            f"Checkpoint {step} of {config.workdir} was saved by another version of poly_epo_jax. Resume with that "
            "version, or set --config.workdir to a new folder."
        )
    best = Path(config.workdir), config.checkpoint.best, step
    checkpoints.values |= hosts.run_on_first(lambda: run_folder.held_out_values(*best))
    return TrainProgress(step, state, saved["position"], int(saved["solved"], 16), saved["ahead"])


def _sampling(config: Config, step: int) -> Sampling:
    """Returns the sampling parameters of a step.

    The seed depends only on `config.seed` and the step, so a step that is repeated after a resume has the same seed.
    """
    return Sampling(**config.sampling, seed=int(np.random.SeedSequence([config.seed, step]).generate_state(1)[0]))


def _packer(config: Config, model_config: ModelConfig, mesh: Mesh) -> MinibatchPacker:
    attention = resolve_implementation(config.model.attention, any(model_config.windows))
    return MinibatchPacker(
        updates_per_step(config.train),
        make_pack(
            config, mesh.shape, attention in SUPPORTS_SHARED_PROMPTS and "linear_layers" not in model_config.stacks
        ),
        config.algo.length_normalization,
        config.sampling.max_tokens,
        max_sequence_tokens(config),
        skip_zero_advantage=skips_zero_advantages(config.algo),
    )


def _tracker(config: Config, step: int) -> contextlib.AbstractContextManager[Tracker | None]:
    """Returns the tracker of a run that continues after `step`, on the first process."""
    if not hosts.is_first():
        return contextlib.nullcontext()
    json_config = json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"
    # Without a checkpoint, all rows are dropped, including those of the evaluation before the first step.
    steps = {"total_steps": config.train.num_steps, "resume_step": step or -1}
    return Tracker(
        Path(config.workdir), json_config, **steps, projects=config.log.projects, method=method_title(config.algo)
    )


def _problems_that_fit(config: Config, task: Task, policy: Policy) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """Returns the training and held-out problems with short enough prompts, and writes the counts to data.json."""
    counts, problems = {}, []
    for name, (part, before) in usable_problems(task).items():
        limits = (config.train.max_prompt_tokens, policy.config.vocab_size)
        part = with_system_prompt(part, config.task.system_prompt)
        kept, too_long = drop_long_prompts(part, policy.tokenizer, *limits)
        counts[name] = {"kept": len(kept), "dropped": dataclasses.asdict(before) | {"too_long": too_long}}
        problems.append(kept)
        if (reasons := reasons_text(counts[name]["dropped"])) and hosts.is_first():
            print(f"{name.replace('_', '-')} problems: {len(kept)}; dropped: {reasons}.")
    hosts.run_on_first(lambda: write_json(Path(config.workdir) / run_folder.DATA, counts))
    train_problems, held_out_problems = problems
    if config.eval.every and not held_out_problems:
        raise ConfigError(
            f"train.max_prompt_tokens={config.train.max_prompt_tokens} excludes every held-out problem; raise it, or "
            "set eval.every=0."
        )
    return train_problems, held_out_problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as specified by the command line (`sys.argv` if None), and returns the exit code."""
    errors = (JudgeError, EpisodeError, DivergenceError, hosts.HostError)
    return run_command(config_parser(__doc__), arguments, lambda config, _: run(config), *errors)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main())
