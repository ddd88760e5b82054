"""The training loop (paper, Algorithm 1): generate, grade, judge, marginalise over sets, update, hand weights back."""

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from grain import DatasetIterator

from poly_epo_jax import set_rl
from poly_epo_jax.algorithm import make_advantages
from poly_epo_jax.batching import PackedBatch, TrainingSequence, pack
from poly_epo_jax.checkpoint import Checkpoints
from poly_epo_jax.config import Config, microbatch_rows
from poly_epo_jax.evaluation.held_out import evaluate_held_out
from poly_epo_jax.experience import Batch, Experience
from poly_epo_jax.grading import check_judge, cluster_ids, judged
from poly_epo_jax.model.sharding import params_on_host
from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.step_metrics import cluster_metrics, logged_generations, rollout_metrics
from poly_epo_jax.timeline import StageClock, Timeline, Window
from poly_epo_jax.tracking import NoTracker, Tracker
from poly_epo_jax.types import (
    Counting,
    GradedGroup,
    Judge,
    Metrics,
    Params,
    Problem,
    Sampling,
    Served,
    Task,
)
from poly_epo_jax.update import PolicyUpdate, TrainState


@dataclasses.dataclass
class Parts:
    """What a run is made of; main.py builds it from a configuration, on every host."""

    task: Task
    held_out: Sequence[Problem]
    judge: Judge
    rollouts: Rollouts
    batches: DatasetIterator
    update: PolicyUpdate
    state: TrainState
    reference: Params | None  # the initial policy, where algo.kl_coef asks for it
    checkpoints: Checkpoints
    tracker: Tracker | NoTracker
    step: int  # already trained


async def train(config: Config, parts: Parts) -> None:
    """Runs from `parts.step` to `config.train.num_steps`. Whatever ends it, the steps that are trained are saved.

    Raises:
      SystemExit: on SIGTERM, on whichever host, after the present step.
      JudgeError: the judge fails more often than `judge.max_failed_share`.
      HostError: another host failed.
    """
    advantages_of = make_advantages(config.algo)
    num_rows = microbatch_rows(config, parts.update.mesh.shape)
    preempted = _catch_sigterm()
    timeline = Timeline()
    experience = _experience(config, parts, timeline)
    state, saved = parts.state, parts.step
    newest = parts.step, state, parts.batches.get_state()
    try:
        if isinstance(parts.judge, Served):
            await hosts.barrier(parts.judge.wait_until_ready())
        await _hand_over(parts, state.params, parts.step)
        if parts.step == 0 and config.eval.every:
            metrics = await _evaluate(config, parts)
            await hosts.barrier(asyncio.to_thread(parts.tracker.log, 0, metrics, {}))

        timeline.cut(parts.step)  # so that all this is in no step's time
        for step in range(parts.step + 1, config.train.num_steps + 1):
            clock = timeline.clock(step)
            is_last = step == config.train.num_steps

            batch = await experience.batch(step)  # which tells the timeline what it does when
            check_judge(batch.graded, config.judge.max_failed_share)

            with clock.stage("advantages"):
                kept = judged(batch.graded)
                rewards, clusters = _stack(kept, config.train.num_generations)
                key = jax.random.fold_in(jax.random.key(config.seed), step)
                advantages = np.asarray(advantages_of(key, rewards, clusters)) if kept else rewards

            # In threads, so that the next batch's generations can be received, graded and judged meanwhile.
            with clock.stage("logprobs"):
                minibatches = await asyncio.to_thread(_pack_minibatches, config, kept, advantages, num_rows)
                minibatches = await hosts.collective(
                    asyncio.to_thread(parts.update.with_old_logprobs, state.params, minibatches, parts.reference)
                )

            with clock.stage("update"):
                newest = None  # for the update consumes the state
                state, update_metrics = await hosts.collective(asyncio.to_thread(parts.update, state, minibatches))
                newest = step, state, batch.data_state

            metrics = rollout_metrics(batch.graded, step) | cluster_metrics(kept, config.algo.set_size)
            metrics |= update_metrics | hosts.total(await hosts.gather(_counts(parts)))
            try:
                with clock.stage("sync"):
                    await _hand_over(parts, state.params, step)
                if config.eval.every and (step % config.eval.every == 0 or is_last):
                    with clock.stage("evaluate"):
                        metrics |= await _evaluate(config, parts)
            finally:
                # A step's rows are on disk before a checkpoint counts it as done: a crash can repeat but not lose them.
                logged = step % config.log.generations_every == 0 or is_last
                rows = logged_generations(batch.graded, advantages) if logged else []
                window = timeline.cut(step)
                log = partial(_log, parts.tracker, step, metrics, _timing(clock, window, batch), window, rows)
                await hosts.barrier(asyncio.to_thread(log))

            if step % config.checkpoint.every == 0:
                with clock.stage("checkpoint"):
                    parts.checkpoints.save(*newest)
                saved = step
            if any(await hosts.gather(preempted())) and not is_last:
                if hosts.is_first():
                    print(f"SIGTERM: saving after step {step}; the same command resumes there.", file=sys.stderr)
                sys.exit(128 + signal.SIGTERM)
    finally:
        await experience.close()
        if newest is not None and newest[0] > saved:
            parts.checkpoints.save(*newest)
        parts.checkpoints.close()


def _experience(config: Config, parts: Parts, timeline: Timeline) -> Experience:
    return Experience(
        parts.rollouts,
        parts.task,
        parts.judge,
        parts.batches,
        config.train.num_generations,
        partial(_sampling, config),
        last_step=config.train.num_steps,
        staleness=config.train.staleness,
        timeline=timeline,
    )


def _sampling(config: Config, step: int) -> Sampling:
    """The step's sampling: another seed for every step, the same for every repetition of it."""
    seed = int(np.random.SeedSequence([config.seed, step]).generate_state(1)[0])
    return Sampling(**config.sampling, seed=seed)


async def _evaluate(config: Config, parts: Parts) -> Metrics:
    problems = parts.held_out[: config.eval.num_problems]
    sampling = Sampling(**config.sampling, seed=config.seed)
    return await evaluate_held_out(
        parts.rollouts, parts.task, parts.judge, problems, config.eval.num_generations, sampling
    )


def _stack(kept: Sequence[GradedGroup], num_generations: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and clusters [P, N] of the prompts that take part in the update."""
    shape = len(kept), num_generations
    rewards = np.array([one.rewards for one in kept], np.float32)
    return rewards.reshape(shape), cluster_ids(kept).reshape(shape)


def _pack_minibatches(
    config: Config, kept: Sequence[GradedGroup], advantages: np.ndarray, num_rows: int
) -> list[list[PackedBatch]]:
    """The batch as minibatches of packed microbatches of `num_rows`; each minibatch is a mean over its own prompts."""
    minibatches = []
    for start in range(0, len(kept), config.train.prompts_per_minibatch):
        prompts = slice(start, start + config.train.prompts_per_minibatch)
        groups = [one.group for one in kept[prompts]]
        lengths = np.array([[len(y.token_ids) for y in group.generations] for group in groups])
        weights = set_rl.token_weights(lengths, config.algo.length_normalization, config.sampling.max_tokens)
        sequences = [
            TrainingSequence(group.prompt_ids, y.token_ids, y.logprobs, float(advantage), float(weight))
            for group, *rows in zip(groups, advantages[prompts], np.asarray(weights), strict=True)
            for y, advantage, weight in zip(group.generations, *rows, strict=True)
        ]
        minibatches.append(pack(sequences, config.train.row_tokens, num_rows))
    return minibatches


async def _hand_over(parts: Parts, params: Params, version: int) -> None:
    """Gives every host's sampler the weights."""
    here = await hosts.collective(asyncio.to_thread(params_on_host, params, parts.update.mesh))
    await hosts.barrier(parts.rollouts.push_weights(here, {}, version))


def _log(
    tracker: Tracker | NoTracker, step: int, metrics: Metrics, timing: Metrics, window: Window, rows: Sequence[Any]
) -> None:
    tracker.log(step, metrics, timing)
    tracker.log_timeline(step, window.row())
    tracker.log_generations(step, rows)


def _timing(clock: StageClock, window: Window, batch: Batch) -> Metrics:
    """Seconds of the step's own stages, and what its window holds, which may be work for another step's batch."""
    num_tokens = sum(len(y.token_ids) for one in batch.graded for y in one.group.generations)
    timing = clock.seconds() | batch.timing | {"seconds/step": window.seconds}
    shares = {"sync/share": timing["seconds/sync"] / window.seconds, "tokens_per_second": num_tokens / window.seconds}
    return timing | window.critical_seconds() | shares


async def _counts(parts: Parts) -> Metrics:
    """What the step's parts counted on this host."""
    counts: Metrics = {}
    for part in (parts.task, parts.judge, parts.rollouts):
        if isinstance(part, Counting):
            counts |= part.metrics()
    return counts


def _catch_sigterm():
    """From now on SIGTERM only sets a flag; the function returned tells whether it came."""
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(True))

    async def came() -> bool:
        return bool(received)

    return came
