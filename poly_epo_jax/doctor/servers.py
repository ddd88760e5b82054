"""Checks the servers of the policy and of the judge: responses, weight push, log-probabilities after it, clusters.

Weights are pushed like in the first step of the run: the weights with which the run would start or resume, with their
version. A run that starts afterwards finds the servers in the state that its own push would produce, and pushes the
weights again.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from poly_epo_jax.config.keys import JudgeSection, RolloutsSection
from poly_epo_jax.doctor.agreement import ReferenceScorer, compare
from poly_epo_jax.doctor.runner import CheckResult, Failed, Finding, RunContext, Skipped
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.model.policy import Policy, find_model, open_policy
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.sharding import params_on_host
from poly_epo_jax.records import run_folder
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.rollouts import SAMPLERS, open_server
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.prompts import drop_long_prompts, with_system_prompt
from poly_epo_jax.rollouts.returned_values import checked_clustering
from poly_epo_jax.startup.base_policy import base_policy_folder
from poly_epo_jax.startup.read_config import make_judge
from poly_epo_jax.startup.trained_policy import open_trained_policy
from poly_epo_jax.step.packing import TrainingSequence
from poly_epo_jax.system.file_lock import InUseError
from poly_epo_jax.system.text import first_line
from poly_epo_jax.types import (
    Clustering,
    Group,
    Judge,
    JudgeFailure,
    Params,
    Problem,
    Sampler,
    Sampling,
    ServerBacked,
)

_Section = TypeVar("_Section", JudgeSection, RolloutsSection)


def find_policy(run: RunContext) -> Policy:
    """Opens the policy of the run without downloading or fitting it.

    Raises:
      Skipped: If the run has no servers, or the policy is not available on this machine.
    """
    config = run.config
    if not SAMPLERS[config.rollouts.name].needs_urls:
        raise Skipped(f"rollouts.name={config.rollouts.name} generates in the trainer")
    if not config.model.path:
        folder = base_policy_folder(config.base, config.task, run.task)
        if not folder.exists():
            raise Skipped("the base policy does not exist yet; it is created when the run starts")
    else:
        try:
            folder = find_model(config.model.path, download=False)
        except OSError:
            folder = Path(config.model.path)
        if not folder.is_dir():
            raise Skipped(f"model.path={config.model.path} is not available on this machine; the run downloads it")
    return open_policy(folder, config.model, lora=config.lora)


def initial_weights(run: RunContext, policy: Policy) -> tuple[Params, int]:
    """Loads the weights with which the run would start.

    Args:
      run: Run that is checked.
      policy: Policy of the run.

    Returns:
      The weights, sharded over the devices of this process, and their step. The weights and the step belong to the
      newest valid checkpoint. If there is no checkpoint, the weights are the policy's and the step is 0.
    """
    workdir, mesh = Path(run.config.workdir), run.mesh
    if run_folder.resumable_config(workdir) is None:
        params, step = policy.load_params(mesh, run.config.seed), 0
    else:
        _, params, step = open_trained_policy(workdir, run.config.model, mesh)
    return params_on_host(params, mesh), step


NUM_PROMPTS, NUM_GENERATIONS, MAX_TOKENS = 4, 2, 32


def check_generations(run: RunContext) -> list[Finding]:
    """Validates generations from each server of rollouts.urls, with the weights that the server currently has."""
    return asyncio.run(_check_servers(run, find_policy(run), None))


def check_weights(run: RunContext) -> list[Finding]:
    """Pushes the initial weights to all servers, and compares their log-probabilities with the trainer's."""
    policy = find_policy(run)
    with _not_training(Path(run.config.workdir)):
        params, step = initial_weights(run, policy)
        sampler = _sampler(run, policy)
        try:
            asyncio.run(hosts.barrier(sampler.push_weights(params, step)))
            message = f"pushed the weights of step {step} to {run.config.rollouts.urls}, like the first step of a run"
            return [
                Finding("weights pushed", "passed", message),
                *asyncio.run(_check_servers(run, policy, params)),
            ]
        finally:
            sampler.close()


def _sampler(run: RunContext, policy: Policy) -> Sampler:
    """Opens the run's sampler with short timeouts."""
    rollouts = _with_short_timeouts(run.config.rollouts)
    config, options = dataclasses.replace(run.config, rollouts=rollouts), rollouts.options
    return SAMPLERS[config.rollouts.name].open(policy.model, run.local_mesh, policy.stop_ids, config, **options)


def _with_short_timeouts(section: _Section) -> _Section:
    """Limits the timeouts of a configuration section: 60 s for a response or a weight update, 20 s for no response."""
    return dataclasses.replace(
        section, timeout_seconds=min(section.timeout_seconds, 60.0), wait_seconds=min(section.wait_seconds, 20.0)
    )


@contextlib.contextmanager
def _not_training(workdir: Path) -> Iterator[None]:
    """Prevents the run from training within this context, because a weight push would make a training run fail.

    Raises:
      Failed: If the run is training.
    """
    with contextlib.ExitStack() as held:
        try:
            if workdir.is_dir():
                hosts.run_on_first(lambda: held.enter_context(run_folder.lock_run_folder(workdir)))
        except InUseError as error:
            raise Failed(f"{error} The servers were not checked; check them when the run has ended") from None
        yield


async def _check_servers(run: RunContext, policy: Policy, params: Params | None) -> list[Finding]:
    """Returns one finding per server. All servers are queried concurrently.

    Args:
      run: Run that is checked.
      policy: Policy of the run.
      params: Weights of the servers. If None, log-probabilities are not compared.
    """
    config = run.config
    urls = [url.strip().rstrip("/") for url in config.rollouts.urls.split(",")]
    groups = await asyncio.gather(*(_generate(run, policy, url) for url in urls), return_exceptions=True)
    scorer = None
    if params is not None:
        max_sequence_tokens = config.train.max_prompt_tokens + MAX_TOKENS
        scorer = ReferenceScorer(
            policy.config, params, run.local_mesh, config.sampling.temperature, max_sequence_tokens
        )
    return [_finding(url, one, scorer, config.rollouts.weights_dtype) for url, one in zip(urls, groups, strict=True)]


async def _generate(run: RunContext, policy: Policy, url: str) -> list[Group]:
    config = dataclasses.replace(run.config, rollouts=_with_short_timeouts(run.config.rollouts))
    limit, max_tokens = config.train.max_prompt_tokens, min(MAX_TOKENS, config.sampling.max_tokens)
    vocab_size = policy.config.vocab_size
    first = with_system_prompt(run.task.train_problems[: 16 * NUM_PROMPTS], config.task.system_prompt)
    problems, _ = drop_long_prompts(first, policy.tokenizer, limit, vocab_size)
    if not problems:
        raise Failed(
            f"all of the first {16 * NUM_PROMPTS} prompts are longer than train.max_prompt_tokens={limit}; increase it"
        )
    server = open_server(url, policy.model, policy.stop_ids, config)
    rollouts = Rollouts(server, policy.tokenizer, run.task, limit, config.model.stop_strings, vocab_size)
    try:
        return [
            group
            async for group in rollouts.generate(
                problems[:NUM_PROMPTS],
                NUM_GENERATIONS,
                Sampling(max_tokens, config.sampling.temperature, seed=config.seed),
            )
        ]
    finally:
        server.close()


def _finding(url: str, groups: list[Group] | BaseException, scorer: ReferenceScorer | None, dtype: str) -> Finding:
    """Returns the finding for a server. If `scorer` is given, log-probabilities computed in `dtype` are compared."""
    name = f"server {url}"
    if isinstance(groups, BaseException):
        return Finding(name, "failed", first_line(groups))
    pairs = [(group.prompt_ids, one) for group in groups for one in group.generations]
    if scorer is None:
        count = sum(int(y.loss_mask.sum()) for _, y in pairs)
        return Finding(name, "passed", f"{count} valid tokens", {"tokens": count})
    sequences = [TrainingSequence(ids, y.token_ids, y.logprobs, y.loss_mask, 1.0, 1.0) for ids, y in pairs]
    try:
        message, figures = compare(scorer, sequences, dtype)
    except Failed as error:
        remedy = "check that the server serves model.path, and that its --dtype is rollouts.weights_dtype"
        return Finding(name, "failed", f"{url}: {error}; {remedy}")
    return Finding(name, "passed", message, figures)


PROBLEM = Problem("doctor", "What is 1 + 2 + ... + 10? Put the answer inside \\boxed{}.", "55")
RESPONSES = (
    "The sum of the first n numbers is n(n + 1)/2. With n = 10 that is 10 * 11 / 2 = 55. \\boxed{55}",
    "By the formula n(n + 1)/2 for n = 10 we get 110 / 2 = 55. \\boxed{55}",
    "I add one after the other: 1, 3, 6, 10, 15, 21, 28, 36, 45, 55. \\boxed{55}",
    "banana banana banana banana",
)
GROUP = RecordedGroup("doctor", PROBLEM, RESPONSES, rewards=(), correct=()).group(0, range(len(RESPONSES)))


def check_judge(run: RunContext) -> CheckResult:
    """Queries the judge like a run does. The quality of the clustering is reported, but does not affect the status."""
    section = run.config.judge
    if not JUDGES[section.name].needs_url:
        raise Skipped(f"judge.name={section.name} is not a server")
    outcome = asyncio.run(_cluster(make_judge(_with_short_timeouts(section), run.task), GROUP))
    if not isinstance(outcome, Clustering):
        reason = f"{outcome.kind}: {outcome.reason}" if isinstance(outcome, JudgeFailure) else "no clusters"
        raise Failed(f"{section.url} returned no clustering ({reason}); see its log, and check judge.options")
    ids = ", ".join(map(str, outcome.ids.tolist()))
    first, second, third, degenerate = outcome.ids.tolist()
    is_expected = first == second and len({first, third, degenerate}) == 3
    assessment = "as expected" if is_expected else "but only the first two share a strategy"
    return f"{section.url} assigned four responses to clusters {ids}, {assessment}", {"clusters": ids}


async def _cluster(judge: Judge, group: Group) -> Clustering | JudgeFailure | None:
    if isinstance(judge, ServerBacked):
        await judge.wait_until_ready()
    return checked_clustering(judge, group, await judge.cluster(group))
