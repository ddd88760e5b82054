"""Checks the policy's servers: their answers, whether they accept the weights, and the probabilities they then give.

The push is the same as in the run's first step, with the weights and the version that the run would begin with. A run
that follows therefore finds the servers as its own push would leave them, and pushes again.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from poly_epo_jax.config.keys import Config
from poly_epo_jax.doctor.agreement import Trainer, compare
from poly_epo_jax.doctor.examine import Failed, Finding, Missing, Subject
from poly_epo_jax.model.policy import Policy, find_model, open_policy
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.sharding import params_on_host
from poly_epo_jax.records import run_folder
from poly_epo_jax.records.run_folder import resumable_config
from poly_epo_jax.rollouts import SAMPLERS, open_server
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import drop_long_prompts
from poly_epo_jax.startup.base_policy import base_policy_folder
from poly_epo_jax.startup.trained_policy import open_trained_policy
from poly_epo_jax.step.packing import TrainingSequence
from poly_epo_jax.system.file_lock import InUseError
from poly_epo_jax.system.text import first_line
from poly_epo_jax.types import Group, Params, Sampler, Sampling


def find_policy(subject: Subject) -> Policy:
    """The policy: model, tokenizer and stop tokens.

    Raises:
      Missing: the policy is not here.
    """
    config = subject.config
    if not config.model.path:
        folder = base_policy_folder(config.base, config.task)
        if not folder.exists():
            raise Missing("the base policy is made when the run starts")
    else:
        try:
            folder = find_model(config.model.path, download=False)
        except OSError:
            folder = Path(config.model.path)
        if not folder.is_dir():
            raise Missing(f"model.path={config.model.path} is not on this machine; the run downloads it")
    return open_policy(folder, config.model, lora=config.lora)


def first_weights(subject: Subject, policy: Policy) -> tuple[Params, int]:
    """A whole copy of the weights on this host's devices, and their step: the newest checkpoint's, if there is one."""
    run, mesh = Path(subject.config.workdir), subject.mesh
    if resumable_config(run) is None:
        params, step = policy.load_params(mesh, subject.config.seed), 0
    else:
        _, params, step = open_trained_policy(run, subject.config.model, mesh)
    return params_on_host(params, mesh), step


PROMPTS, GENERATIONS, LONGEST = 4, 2, 32
SECONDS = 60.0  # the most that an answer or a weight update may take
WAIT_SECONDS = 20.0  # for a server to answer at all


def check_answers(subject: Subject) -> list[Finding]:
    """Checks the form of generations from each of rollouts.urls, with its own weights; no other form is believed."""
    policy = _policy(subject)
    return asyncio.run(_of_each_url(subject, policy, None))


def check_weights(subject: Subject) -> list[Finding]:
    """Pushes the run's first weights to all servers, and compares their log-probabilities with the trainer's."""
    policy = _policy(subject)
    with _not_training(Path(subject.config.workdir)):
        params, step = first_weights(subject, policy)
        sampler = _sampler(subject, policy)
        try:
            asyncio.run(hosts.barrier(sampler.push_weights(params, step)))
            seen = (
                f"the weights of step {step} are pushed to {subject.config.rollouts.urls}, as a run's first step does"
            )
            pushed = Finding("weights pushed", "passed", seen)
            return [pushed, *asyncio.run(_of_each_url(subject, policy, params))]
        finally:
            sampler.close()


def _policy(subject: Subject) -> Policy:
    if not SAMPLERS[subject.config.rollouts.name].needs_urls:
        raise Missing(f"rollouts.name={subject.config.rollouts.name} generates in the trainer")
    return find_policy(subject)


def _sampler(subject: Subject, policy: Policy) -> Sampler:
    """The run's own sampler, but less patient."""
    config, options = _impatient(subject.config), subject.config.rollouts.options
    return SAMPLERS[config.rollouts.name].open(policy.model, subject.here, policy.stop_ids, config, **options)


def _impatient(config: Config) -> Config:
    rollouts = config.rollouts
    return dataclasses.replace(
        config,
        rollouts=dataclasses.replace(
            rollouts,
            timeout_seconds=min(rollouts.timeout_seconds, SECONDS),
            wait_seconds=min(rollouts.wait_seconds, WAIT_SECONDS),
        ),
    )


@contextlib.contextmanager
def _not_training(workdir: Path) -> Iterator[None]:
    """Keeps a run from training meanwhile: pushing weights while it trains would end it.

    Raises:
      Failed: a run is training.
    """
    with contextlib.ExitStack() as held:
        try:
            if workdir.is_dir():
                hosts.on_first(lambda: held.enter_context(run_folder.in_use(workdir)))
        except InUseError as error:
            raise Failed(f"{error} Its servers are left alone; check them when it has ended") from None
        yield


async def _of_each_url(subject: Subject, policy: Policy, params: Params | None) -> list[Finding]:
    """A finding for each URL. All servers are asked at once.

    Args:
      params: the weights that the servers have; None if these are unknown.
    """
    config = subject.config
    urls = [url.strip().rstrip("/") for url in config.rollouts.urls.split(",")]
    groups = await asyncio.gather(*(_generated(subject, policy, url) for url in urls), return_exceptions=True)
    trainer = None
    if params is not None:
        longest = config.train.max_prompt_tokens + LONGEST
        trainer = Trainer(policy.config, params, subject.here, config.sampling.temperature, longest)
    return [_finding(url, one, trainer, config.rollouts.weights_dtype) for url, one in zip(urls, groups, strict=True)]


async def _generated(subject: Subject, policy: Policy, url: str) -> list[Group]:
    config = _impatient(subject.config)
    limit, longest = config.train.max_prompt_tokens, min(LONGEST, config.sampling.max_tokens)
    problems, _ = drop_long_prompts(subject.task.train_problems[: 16 * PROMPTS], policy.tokenizer, limit)
    if not problems:
        raise Failed(f"none of the first {16 * PROMPTS} prompts has train.max_prompt_tokens={limit} or less; raise it")
    server = open_server(url, policy.model, policy.stop_ids, config)
    rollouts = Rollouts(server, policy.tokenizer, subject.task, limit, config.model.stop_strings)
    try:
        sampling = Sampling(longest, config.sampling.temperature, seed=config.seed)
        return [group async for group in rollouts.generate(problems[:PROMPTS], GENERATIONS, sampling)]
    finally:
        server.close()


def _finding(url: str, groups: list[Group] | BaseException, trainer: Trainer | None, dtype: str) -> Finding:
    """The finding for a server that computes in `dtype`; its log-probabilities are compared if there is a trainer."""
    name = f"server {url}"
    if isinstance(groups, BaseException):
        return Finding(name, "failed", first_line(groups))
    pairs = [(group.prompt_ids, one) for group in groups for one in group.generations]
    if trainer is None:
        count = sum(int(y.loss_mask.sum()) for _, y in pairs)
        return Finding(name, "passed", f"{count} tokens in the form that was asked for", {"tokens": count})
    sequences = [TrainingSequence(ids, y.token_ids, y.logprobs, y.loss_mask, 1.0, 1.0) for ids, y in pairs]
    try:
        seen, figures = compare(trainer, sequences, dtype)
    except Failed as error:
        advice = "see that it serves model.path, and that its --dtype is rollouts.weights_dtype"
        return Finding(name, "failed", f"{url}: {error}; {advice}")
    return Finding(name, "passed", seen, figures)
