"""The training loop (paper, Algorithm 1): generate, grade, cluster, marginalise over sets, update, push the weights."""

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from poly_epo_jax.algorithm import Features
from poly_epo_jax.checkpoint import Checkpoints
from poly_epo_jax.experience import Batch, Experience
from poly_epo_jax.features import batch_features
from poly_epo_jax.minibatches import MinibatchPacker
from poly_epo_jax.model.sharding import params_on_host
from poly_epo_jax.objective import DivergenceError, check_finite
from poly_epo_jax.parallel import hosts
from poly_epo_jax.step_metrics import logged_generations, step_metrics
from poly_epo_jax.timeline import Timeline
from poly_epo_jax.tracking import NoTracker, Tracker
from poly_epo_jax.types import Metrics, Params
from poly_epo_jax.update import PolicyUpdate, TrainState


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run can go on from: the number of steps done, the state after them, and where the data stands."""

    step: int
    state: TrainState
    data_state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A step's batch, what its generations were worth [P, N] over the prompts that are trained on, and metrics."""

    batch: Batch
    advantages: np.ndarray
    metrics: Metrics


@dataclasses.dataclass
class Trainer:
    """A policy in training, on every host. `step` is Algorithm 1 of the paper.

    Args:
      advantages: (step, features of a batch) -> advantages, see algorithm.py.
      packer: from generations and advantages to minibatches.
      trained: where training stands; None while an update has consumed the state and not returned another.
      reference: the initial policy, where the update has a KL term.
      set_size: n, for the metrics of clusters.
    """

    experience: Experience
    advantages: Callable[[int, Features], np.ndarray]
    packer: MinibatchPacker
    update: PolicyUpdate
    timeline: Timeline
    trained: Trained | None
    reference: Params | None
    set_size: int
    result: StepResult | None = None

    async def step(self, step: int) -> None:
        """Trains on one batch and gives the sampler the new weights; `result` says what it did, also if that fails."""
        clock, self.result = self.timeline.clock(step), None
        batch = await self.experience.batch(step)
        counts = await self.experience.counts()
        with clock.stage("advantages"):
            features = batch_features(batch.usable, self.experience.num_generations)
            advantages = self.advantages(step, features) if batch.usable else features["rewards"]
        with clock.stage("logprobs"):
            minibatches = await asyncio.to_thread(self.packer, batch.usable, advantages)
            minibatches = await self._compute(self.update.with_old_logprobs, self.state, minibatches, self.reference)
        with clock.stage("update"):
            state, self.trained = self.state, None
            state, metrics = await self._compute(self.update, state, minibatches)
            check_finite(metrics, f"Step {step}")  # on all hosts alike, as all have the same numbers
            self.trained = Trained(step, state, batch.data_state)
        skipped = {"judge/skipped_updates": float(sum(not minibatch for minibatch in minibatches))}
        metrics = step_metrics(batch.graded, step, self.set_size) | metrics | counts | skipped
        self.result = StepResult(batch, advantages, metrics)
        with clock.stage("sync"):
            await self.push_weights(step)

    async def push_weights(self, version: int) -> None:
        """Gives every host's sampler the present weights."""
        weights = {"trainable": self.state.trainable, "frozen": self.state.frozen}
        here = await self._compute(params_on_host, weights, self.update.mesh)
        await hosts.barrier(self.experience.rollouts.push_weights(here["trainable"], here["frozen"], version))

    @property
    def state(self) -> TrainState:
        """The present one."""
        assert self.trained is not None, "an update has failed, and with it went the state"
        return self.trained.state

    async def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls it on all hosts, in a thread: the next batch is received, graded and clustered meanwhile."""
        return await hosts.collective(asyncio.to_thread(function, *arguments))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How many steps a run has, and after how many it does what is not done after each; the last step does all."""

    num_steps: int
    evaluate: int  # 0: never
    checkpoint: int
    log_generations: int

    def is_due(self, every: int, step: int) -> bool:
        return bool(every) and (step % every == 0 or step == self.num_steps)


async def train(
    trainer: Trainer,
    evaluate: Callable[[], Awaitable[Metrics]],
    checkpoints: Checkpoints,
    tracker: Tracker | NoTracker,
    plan: Schedule,
) -> None:
    """Runs the steps that are left. Whatever ends it, the steps that are trained are saved.

    Args:
      evaluate: what the policy does on held-out problems.

    Raises:
      SystemExit: on SIGTERM, on whichever host, after the present step.
      JudgeError: the judge fails more often than `judge.max_failed_share`.
      DivergenceError: an update is not finite; nothing of its step is saved.
      HostError: another host failed.
    """
    assert trainer.trained is not None
    preempted, saved = _catch_sigterm(), trainer.trained.step
    first = saved + 1
    try:
        await trainer.experience.wait_until_ready()
        await trainer.push_weights(saved)
        if not saved and plan.evaluate:
            await hosts.barrier(asyncio.to_thread(tracker.log, 0, await evaluate(), {}))
        trainer.timeline.cut(saved)  # so that all this is in no step's time
        for step in range(first, plan.num_steps + 1):
            held_out: Metrics = {}
            try:
                await trainer.step(step)
                if plan.is_due(plan.evaluate, step):
                    with trainer.timeline.clock(step).stage("evaluate"):
                        held_out = await evaluate()
            except DivergenceError as error:
                good = f"the checkpoint of step {saved} is good" if saved else "there is no checkpoint yet"
                raise DivergenceError(
                    f"{error}, so it is not saved; {good}. The same command would end here again: set --config.workdir "
                    "to a new folder, and for example a lower optimizer.learning_rate; model.path may be an export of "
                    "a good checkpoint."
                ) from error
            finally:
                # A step's rows are on disk before a checkpoint counts it as done: a crash can repeat but not lose them.
                if trainer.result is not None:
                    await _record(trainer, tracker, held_out, plan.is_due(plan.log_generations, step))
            if step % plan.checkpoint == 0:
                with trainer.timeline.clock(step).stage("checkpoint"):
                    saved = _save(checkpoints, trainer.trained)
            if any(await hosts.gather(preempted())) and step < plan.num_steps:
                if hosts.is_first():
                    print(f"SIGTERM: saving after step {step}; the same command resumes there.", file=sys.stderr)
                sys.exit(128 + signal.SIGTERM)
    finally:
        await trainer.experience.close()
        if trainer.trained is not None and trainer.trained.step > saved:
            _save(checkpoints, trainer.trained)
        checkpoints.close()


async def _record(trainer: Trainer, tracker: Tracker | NoTracker, held_out: Metrics, with_generations: bool) -> None:
    """Logs the step that has just been trained; one host writes."""
    trained, result = trainer.trained, trainer.result
    assert trained is not None and result is not None
    step, graded = trained.step, result.batch.graded
    clock, window = trainer.timeline.clock(step), trainer.timeline.cut(step)
    num_tokens = sum(int(y.loss_mask.sum()) for group in graded for y in group.group.generations)
    timing = clock.seconds() | result.batch.timing | {"seconds/step": window.seconds} | window.critical_seconds()
    timing["sync/share"] = timing.get("seconds/sync", 0.0) / window.seconds
    timing["tokens_per_second"] = num_tokens / window.seconds
    rows = logged_generations(graded, result.batch.usable, result.advantages) if with_generations else []

    def write() -> None:
        tracker.log(step, result.metrics | held_out, timing)
        tracker.log_timeline(step, window.row())
        tracker.log_generations(step, rows)

    await hosts.barrier(asyncio.to_thread(write))


def _save(checkpoints: Checkpoints, trained: Trained) -> int:
    checkpoints.save(trained.step, trained.state, trained.data_state)
    return trained.step


def _catch_sigterm() -> Callable[[], Awaitable[bool]]:
    """From now on SIGTERM only sets a flag; the function returned tells whether it came."""
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(True))

    async def came() -> bool:
        return bool(received)

    return came
