"""The training loop (paper, Algorithm 1): generate, grade, cluster, marginalise over sets, update, push the weights."""

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from poly_epo_jax.experience import Batch, Experience
from poly_epo_jax.model import attention
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.devices import peak_bytes
from poly_epo_jax.parallel.sharding import params_on_host
from poly_epo_jax.records.timeline import Timeline, Window
from poly_epo_jax.records.tracking import Tracker
from poly_epo_jax.step.advantages import Features, batch_features
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.objective import DivergenceError, check_finite
from poly_epo_jax.step.step_metrics import logged_generations, step_metrics
from poly_epo_jax.step.update import PolicyUpdate, TrainState
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.system.signals import Stopped
from poly_epo_jax.types import Metrics, Params


@dataclasses.dataclass(frozen=True)
class Unlogged:
    """What is to be logged of a step: its metrics, rows of its generations, and its evaluation.

    `held_out` is None if the evaluation is still to be done, and empty if none is due.
    """

    metrics: Metrics
    generations: list[Row]
    held_out: Metrics | None = None


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run can continue from: the number of steps done, the state after them, and the data position.

    `unlogged` is of the last of these steps, if its evaluation is still to be done or its rows could not be written.
    """

    step: int
    state: TrainState
    data_state: dict[str, Any]
    unlogged: Unlogged | None = None


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A step's batch, the advantages [P, N] of the prompts that are trained on, and metrics."""

    batch: Batch
    advantages: np.ndarray
    metrics: Metrics


@dataclasses.dataclass
class Trainer:
    """A policy in training, on every host. `step` is Algorithm 1 of the paper.

    Args:
      advantages: (step, features of a batch) -> advantages, see step/advantages.py.
      packer: makes minibatches of generations and advantages.
      trained: the progress so far; None while an update has consumed the state and not yet returned a new one.
      reference: the initial policy's weights, at least the trainable ones, if the update has a KL term.
      set_size: n, for the cluster metrics.
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
        """Trains on one batch, and pushes the new weights to the sampler; `result` is set even if the push fails."""
        clock, self.result = self.timeline.clock(step), None
        batch = await self.experience.batch(step)
        counts = await self.experience.counts()
        await hosts.barrier(self.experience.stop.interrupts(self.experience.rollouts.sleep()))
        with clock.stage("advantages"):
            features = batch_features(batch.usable, self.experience.num_generations)
            advantages = self.advantages(step, features) if batch.usable else features["rewards"]
        with clock.stage("logprobs"):
            minibatches = await asyncio.to_thread(self.packer, batch.usable, advantages)
            minibatches = await self._compute(self.update.with_old_logprobs, self.state, minibatches, self.reference)
        with clock.stage("update"):
            state, self.trained = self.state, None
            state, metrics = await self._compute(self.update, state, minibatches)
            check_finite(metrics, f"Step {step}")  # the same on all hosts, as all have the same numbers
            self.trained = Trained(step, state, batch.data_state)
        skipped = {"judge/skipped_updates": float(sum(not minibatch for minibatch in minibatches))}
        metrics = step_metrics(batch.graded, step, self.set_size) | metrics | counts | skipped
        self.result = StepResult(batch, advantages, metrics)
        with clock.stage("sync"):
            await self.push_weights(step)

    async def push_weights(self, version: int) -> None:
        """Pushes the current weights to every host's sampler."""
        params = await self._compute(params_on_host, self.state.params, self.update.mesh)
        push = self.experience.rollouts.push_weights(params, version)
        await hosts.barrier(self.experience.stop.interrupts(push))

    @property
    def state(self) -> TrainState:
        """The current state."""
        assert self.trained is not None, "an update has failed, and with it went the state"
        return self.trained.state

    async def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function on all hosts, in a thread: meanwhile the next batch is received, graded and clustered."""
        return await hosts.collective(asyncio.to_thread(function, *arguments))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How many steps a run has, and how many lie between evaluations, checkpoints and logs; the last step has all."""

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
    tracker: Tracker | None,
    plan: Schedule,
) -> None:
    """Runs the remaining steps. However it ends, the steps that have been trained are saved.

    Args:
      evaluate: evaluates the policy on held-out problems.

    Raises:
      SystemExit: on SIGTERM, SIGHUP or Ctrl-C on any host, once waits are abandoned and computations have finished.
      JudgeError: the judge fails more often than `judge.max_failed_share`.
      DivergenceError: an update is not finite; nothing of its step is saved.
      HostError: another host failed.
      OSError: a checkpoint or a row cannot be written.
    """
    assert trainer.trained is not None
    saved, stopped = trainer.trained.step, None
    with trainer.experience.stop.on_signals():
        try:
            await _begin(trainer, evaluate, tracker, plan)
            for step in range(saved + 1, plan.num_steps + 1):
                await _step(trainer, evaluate, checkpoints, tracker, plan, step)
                if step % plan.checkpoint == 0:
                    with trainer.timeline.clock(step).stage("checkpoint"):
                        saved = _save(checkpoints, trainer.trained)
                if step < plan.num_steps:
                    await hosts.barrier(trainer.experience.stop.check())
        except DivergenceError as error:
            good = f"the checkpoint of step {saved} is good" if saved else "there is no checkpoint yet"
            raise DivergenceError(
                f"{error}, so it is not saved; {good}. The same command would end here again: set --config.workdir "
                "to a new folder, and for example a lower optimizer.learning_rate; model.path may be an export of "
                "a good checkpoint."
            ) from error
        except Stopped as caught:
            stopped = caught
        finally:
            await trainer.experience.close()
            if trainer.trained is not None and trainer.trained.step > saved:
                saved = _save(checkpoints, trainer.trained)
            checkpoints.close()
        if stopped is not None:
            if hosts.is_first():
                kept = f"saved after step {saved}" if saved else "no step is trained yet"
                print(f"{stopped}: {kept}; the same command goes on from there.", file=sys.stderr)
            sys.exit(128 + stopped.number)  # as shells report a process that a signal ended


async def _begin(
    trainer: Trainer, evaluate: Callable[[], Awaitable[Metrics]], tracker: Tracker | None, plan: Schedule
) -> None:
    """Waits for servers, and evaluates the policy before the first step, or after one that was left unevaluated."""
    trained = trainer.trained
    assert trained is not None
    await trainer.experience.wait_until_ready()
    await trainer.push_weights(trained.step)
    unlogged = trained.unlogged
    if unlogged is not None:
        held_out = await evaluate() if unlogged.held_out is None else unlogged.held_out
        await _log(tracker, trained.step, unlogged, held_out, {})
        trainer.trained = dataclasses.replace(trained, unlogged=None)
    elif not trained.step and plan.evaluate:
        await _log(tracker, 0, Unlogged({}, []), await evaluate(), {})
    trainer.timeline.cut(trained.step)  # so that none of this counts as a step's time


async def _step(
    trainer: Trainer,
    evaluate: Callable[[], Awaitable[Metrics]],
    checkpoints: Checkpoints,
    tracker: Tracker | None,
    plan: Schedule,
    step: int,
) -> None:
    """Trains, evaluates if that is due, and logs the step, however it ends once it is trained.

    Its rows are on disk before a checkpoint counts it as done: a crash can repeat but not lose them. If the evaluation
    is interrupted, or the rows cannot be written, they go into the checkpoint, and the resumed run logs them.
    """
    held_out: Metrics | None = None if plan.is_due(plan.evaluate, step) else {}
    try:
        await trainer.step(step)
        if held_out is None:
            with trainer.timeline.clock(step).stage("evaluate"):
                held_out = await evaluate()
    finally:
        if trainer.result is not None:
            result, trained = trainer.result, trainer.trained
            assert trained is not None
            due = plan.is_due(plan.log_generations, step)
            rows = logged_generations(result.batch.graded, result.batch.usable, result.advantages) if due else []
            unlogged = Unlogged({name: float(value) for name, value in result.metrics.items()}, rows, held_out)
            trainer.trained = dataclasses.replace(trained, unlogged=unlogged)
            if held_out is not None:
                timing = {"checkpoints/damaged": float(checkpoints.num_damaged)}
                timing["attention/distrusted_kernels"] = float(len(attention.distrusted))
                await _record(trainer, tracker, unlogged, held_out, timing)
                trainer.trained = trained


async def _record(
    trainer: Trainer, tracker: Tracker | None, unlogged: Unlogged, held_out: Metrics, timing: Metrics
) -> None:
    """Logs the step that has just been trained, and how long it took."""
    result = trainer.result
    assert result is not None and trainer.trained is not None
    step = trainer.trained.step
    clock, window = trainer.timeline.clock(step), trainer.timeline.cut(step)
    num_tokens = sum(int(y.loss_mask.sum()) for group in result.batch.graded for y in group.group.generations)
    timing = timing | clock.seconds() | result.batch.timing | {"seconds/step": window.seconds}
    timing |= window.critical_seconds()
    timing["sync/share"] = timing.get("seconds/sync", 0.0) / window.seconds
    timing["tokens_per_second"] = num_tokens / window.seconds
    if (held := peak_bytes()) is not None:
        timing["memory/peak_bytes"] = float(held)
    await _log(tracker, step, unlogged, held_out, timing, window)


async def _log(
    tracker: Tracker | None,
    step: int,
    unlogged: Unlogged,
    held_out: Metrics,
    timing: Metrics,
    window: Window | None = None,
) -> None:
    """Writes a step's rows, on one host only."""

    def write() -> None:
        if tracker is None:
            return
        tracker.log(step, unlogged.metrics | held_out, timing)
        if window is not None:
            tracker.log_timeline(step, window.row())
        tracker.log_generations(step, unlogged.generations)

    await hosts.barrier(asyncio.to_thread(write))


def _save(checkpoints: Checkpoints, trained: Trained) -> int:
    unlogged = None if trained.unlogged is None else dataclasses.asdict(trained.unlogged)
    checkpoints.save(trained.step, trained.state, {"batches": trained.data_state, "unlogged": unlogged})
    return trained.step
