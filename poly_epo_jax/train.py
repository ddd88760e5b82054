"""The training loop (paper, Algorithm 1): generate, grade, judge, marginalise over sets, update, hand weights back."""

import dataclasses
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from grain import DatasetIterator
from ml_collections import ConfigDict

from poly_epo_jax import set_rl
from poly_epo_jax.algorithm import make_advantages
from poly_epo_jax.batching import PackedBatch, TrainingSequence, pack
from poly_epo_jax.checkpoint import Checkpoints
from poly_epo_jax.clock import StageClock
from poly_epo_jax.grading import grade_groups, judged
from poly_epo_jax.heldout import evaluate_held_out
from poly_epo_jax.metrics.diversity import distinct_clusters
from poly_epo_jax.tracking import Tracker
from poly_epo_jax.types import GradedGroup, Judge, JudgeFailure, Metrics, Params, Rollouts, Sampling, Task
from poly_epo_jax.update import PolicyUpdate, TrainState


@dataclasses.dataclass
class Parts:
    """What a run is made of; main.py builds it from a configuration."""

    task: Task
    judge: Judge
    rollouts: Rollouts
    batches: DatasetIterator
    update: PolicyUpdate
    state: TrainState
    reference: Params | None  # the initial policy, where algo.kl_coef asks for it
    checkpoints: Checkpoints
    tracker: Tracker
    step: int  # already trained


async def train(config: ConfigDict, parts: Parts) -> None:
    """Runs from `parts.step` to `config.train.num_steps`.

    Raises:
      SystemExit: on SIGTERM, after the present step has been saved.
    """
    advantages_of = make_advantages(config.algo)
    preempted = _catch_sigterm()
    state = parts.state
    if parts.step == 0 and config.eval.every:
        parts.tracker.log(0, await _evaluate(config, parts), {})

    for step in range(parts.step + 1, config.train.num_steps + 1):
        clock = StageClock()
        is_last = step == config.train.num_steps
        problems = next(parts.batches)

        with clock.stage("generate"):
            groups = parts.rollouts.generate(problems, config.train.num_generations, _sampling(config, step))
            graded = await grade_groups(groups, problems, parts.task, parts.judge)

        with clock.stage("advantages"):
            kept = judged(graded)
            rewards, clusters = _stack(kept, config.train.num_generations)
            key = jax.random.fold_in(jax.random.key(config.seed), step)
            advantages = np.asarray(advantages_of(key, rewards, clusters)) if kept else rewards

        with clock.stage("logprobs"):
            minibatches = _pack_minibatches(config, kept, advantages)
            minibatches = parts.update.with_old_logprobs(state.params, minibatches, parts.reference)

        with clock.stage("update"):
            state, update_metrics = parts.update(state, minibatches)

        with clock.stage("sync"):
            parts.rollouts.update_weights(state.params, step)

        metrics = _rollout_metrics(graded) | _cluster_metrics(config, rewards, clusters) | update_metrics
        if config.eval.every and (step % config.eval.every == 0 or is_last):
            with clock.stage("evaluate"):
                metrics |= await _evaluate(config, parts)

        # A step's rows are on disk before a checkpoint counts the step as done: a crash can repeat but not lose them.
        num_tokens = sum(len(y.token_ids) for one in graded for y in one.group.generations)
        parts.tracker.log(step, metrics, clock.seconds() | {"tokens_per_second": num_tokens / clock.total()})
        if step % config.log.samples_every == 0 or is_last:
            parts.tracker.log_samples(step, _sample_rows(graded, advantages))
        if step % config.checkpoint.every == 0 or is_last or preempted():
            parts.checkpoints.save(step, state, parts.batches.get_state())
        if preempted() and not is_last:
            parts.checkpoints.close()
            print(f"SIGTERM: saved after step {step}; the same command resumes there.", file=sys.stderr)
            sys.exit(128 + signal.SIGTERM)
    parts.checkpoints.close()


def _sampling(config: ConfigDict, step: int) -> Sampling:
    """The step's sampling: another seed for every step, the same for every repetition of it."""
    seed = int(np.random.SeedSequence([config.seed, step]).generate_state(1)[0])
    return Sampling(**config.sampling, seed=seed)


async def _evaluate(config: ConfigDict, parts: Parts) -> Metrics:
    problems = parts.task.held_out_problems[: config.eval.num_problems]
    sampling = Sampling(**config.sampling, seed=config.seed)
    return await evaluate_held_out(
        parts.rollouts, parts.task, parts.judge, problems, config.eval.num_generations, sampling
    )


def _stack(kept: Sequence[GradedGroup], num_generations: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and clusters [P, N] of the prompts that take part in the update."""
    rewards = [one.rewards for one in kept]
    clusters = [one.clusters for one in kept]
    shape = len(kept), num_generations
    return np.array(rewards, np.float32).reshape(shape), np.array(clusters, np.int32).reshape(shape)


def _pack_minibatches(
    config: ConfigDict, kept: Sequence[GradedGroup], advantages: np.ndarray
) -> list[list[PackedBatch]]:
    """The batch as minibatches of packed microbatches; each minibatch is a mean over its own prompts."""
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
        minibatches.append(pack(sequences, config.train.row_tokens, config.train.rows_per_microbatch))
    return minibatches


def _rollout_metrics(graded: Sequence[GradedGroup]) -> Metrics:
    rewards = np.stack([one.rewards for one in graded])
    generations = [y for one in graded for y in one.group.generations]
    return {
        "reward": float(rewards.mean()),
        "solved": float((rewards == 1).any(axis=1).mean()),
        "response/length": float(np.mean([len(y.token_ids) for y in generations])),
        "response/truncated": float(np.mean([y.finish_reason == "length" for y in generations])),
        "judge/failed_prompts": float(len(graded) - len(judged(graded))),
    }


def _cluster_metrics(config: ConfigDict, rewards: np.ndarray, clusters: np.ndarray) -> Metrics:
    """Means over the prompts that have a clustering; `synergy` is the mean size of the covariance term."""
    if not len(rewards):
        return {}
    reasoned, correct = clusters != set_rl.DEGENERATE_CLUSTER, rewards == 1
    terms = set_rl.exploration_exploitation_synergy(rewards, clusters, config.algo.set_size)
    size = rewards.shape[1]
    return {
        "clusters/correct": float(distinct_clusters(clusters, correct & reasoned, size).mean()),
        "clusters/incorrect": float(distinct_clusters(clusters, ~correct & reasoned, size).mean()),
        "degenerate": float(1 - reasoned.mean()),
        "synergy": float(np.abs(terms.synergy).mean()),
    }


def _sample_rows(graded: Sequence[GradedGroup], advantages: np.ndarray) -> list[dict[str, Any]]:
    advantage_rows = iter(advantages.tolist())
    rows = []
    for one in graded:
        if isinstance(one.clusters, JudgeFailure):
            clusters = of_prompt = [None] * len(one.rewards)
        else:
            clusters, of_prompt = one.clusters.tolist(), next(advantage_rows)
        rows += [
            {
                "problem": one.group.problem.id,
                "prompt": one.group.problem.prompt,
                "generation": index,
                "response": y.text,
                "reward": float(one.rewards[index]),
                "cluster": clusters[index],
                "advantage": of_prompt[index],
            }
            for index, y in enumerate(one.group.generations)
        ]
    return rows


def _catch_sigterm():
    """From now on SIGTERM only sets a flag; the function returned tells whether it came."""
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(True))
    return lambda: bool(received)
