"""The training loop. `Trainer.step` is Algorithm 1 of the paper; `train` pushes weights, logs, evaluates and saves."""

import asyncio
import dataclasses
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from poly_epo_jax.config.keys import Config
from poly_epo_jax.experience import Batch, Experience
from poly_epo_jax.model import attention
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.devices import peak_bytes
from poly_epo_jax.parallel.sharding import params_on_host
from poly_epo_jax.records.profile import StepProfiler
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.records.tracking import Tracker
from poly_epo_jax.rollouts.grading import JudgeError
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.objective import DivergenceError, check_finite
from poly_epo_jax.step.step_metrics import logged_generations, solved_problems, step_metrics
from poly_epo_jax.step.truncation import Truncation
from poly_epo_jax.step.update import PolicyUpdate, TrainState
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.system.signals import Stopped
from poly_epo_jax.types import Metrics, Params


@dataclasses.dataclass(frozen=True)
class TrainProgress:
    """The part of a run that a checkpoint stores.

    Attributes:
      step: Number of completed steps.
      state: Weights and optimizer state after these steps.
      position: Number of problems that these steps have drawn.
      solved: Training problems with a correct generation in any of these steps, see `solved_problems`.
      ahead: Number of prompts that were drawn ahead, `Batch.ahead`.
    """

    step: int
    state: TrainState
    position: int
    solved: int
    ahead: int = 0


@dataclasses.dataclass
class Trainer:
    """A policy in training. Every process holds one, and all processes call its methods together.

    Attributes:
      experience: Produces the batch of each step.
      truncation: Leaves out or penalizes truncated responses.
      packer: Packs generations and advantages into minibatches.
      update: Updates the policy.
      timeline: Records the time that each stage takes.
      progress: Progress so far. None while an update has consumed the state and has not returned a new one.
      reference: Weights of the initial policy if the objective has a KL term, otherwise None. Frozen weights may be
        left out.
      set_size: Set size n, for the cluster metrics.
      positions: Position of each training problem, by id.
      pushed_dtype: Type in which several processes copy the weights to their samplers. If empty, that of the weights.
    """

    experience: Experience
    truncation: Truncation
    packer: MinibatchPacker
    update: PolicyUpdate
    timeline: Timeline
    progress: TrainProgress | None
    reference: Params | None
    set_size: int
    positions: Mapping[str, int]
    pushed_dtype: str = ""

    async def step(self, step: int) -> tuple[Batch, Metrics]:
        """Trains on one batch (paper, Algorithm 1). Returns the batch, and the metrics of the batch and the update.

        Raises:
          JudgeError: If the judge failed on too many prompts of the batch.
          DivergenceError: If a metric of the update is not finite.
          Stopped: If a shutdown was requested.
        """
        stage, before = self.timeline.clock(step).stage, self.current
        # Samples, rewards and clusters N generations of each prompt, and computes their advantages.
        batch = await self.experience.batch(step, before.position)
        advantages, truncation_metrics = self.truncation(batch.usable, batch.advantages)
        batch = dataclasses.replace(batch, advantages=advantages)
        with stage("logprobs"):
            minibatches = await asyncio.to_thread(self.packer, *batch.trained)
            minibatches = await _compute(self.update.with_old_logprobs, before.state, minibatches, self.reference)
        metrics = step_metrics(batch.graded, step, self.set_size) | batch.counts | truncation_metrics
        solved_in_batch = solved_problems(batch.graded, self.positions)
        solved = before.solved | solved_in_batch
        counts = {"train/solved_in_batch": solved_in_batch, "train/ever_solved": solved}
        metrics |= {name: float(bits.bit_count()) for name, bits in counts.items()}
        with stage("update"):
            self.progress = None  # the update donates the buffers of the state
            state, update_metrics = await _compute(self.update, before.state, minibatches)
            check_finite(update_metrics, f"Step {step}")  # raises on all processes, because their metrics are equal
            self.progress = TrainProgress(step, state, batch.position, solved, batch.ahead)
        return batch, metrics | update_metrics

    async def push_weights(self) -> None:
        """Pushes the current weights to the sampler of every process.

        The version of the weights is the number of completed steps. Generations keep the version that they were sampled
        with, from which `response/staleness` is computed.
        """
        params = await _compute(params_on_host, self.current.state.params, self.update.mesh, self.pushed_dtype)
        push = self.experience.rollouts.push_weights(params, self.current.step)
        await hosts.barrier(self.experience.stop.run_interruptible(push))

    @property
    def current(self) -> TrainProgress:
        """The progress so far, with the training state."""
        assert self.progress is not None, "Training state is unavailable: the last update failed after consuming it."
        return self.progress


async def train(
    trainer: Trainer,
    evaluate: Callable[[], Awaitable[Metrics]],
    checkpoints: Checkpoints,
    tracker: Tracker | None,
    config: Config,
    is_evaluated: bool = False,
    audit: Callable[[int, Sequence[Row]], None] | None = None,
) -> None:
    """Runs the remaining steps.

    If training fails, the last completed step is saved, provided that its rows were written and that a failed update
    has not consumed its state.

    Args:
      trainer: Trainer with the progress to continue from.
      evaluate: Evaluates the policy on held-out problems.
      checkpoints: Checkpoints of the run.
      tracker: Writes the records of the run. None on processes that do not log.
      config: The configuration, with the number of steps and the intervals between evaluations, checkpoints and logged
        generations. Evaluations also take place before the first step and at the last step, and the last step always
        ends with a checkpoint, as does a step with a better evaluation than all before.
      is_evaluated: Whether the policy that training continues from has been evaluated.
      audit: Function of a step of `audit.every` and its rows of generations.jsonl, which starts an audit and does not
        wait for it. None on processes that do not log, or without audits.

    Raises:
      SystemExit: On SIGTERM, SIGHUP or Ctrl-C on any process. Pending waits are cancelled; running computations finish.
      JudgeError: If the judge fails on a larger fraction of prompts than `judge.max_failed_fraction`, or if an audit
        has stopped the run, see `audit.stop_inflation`.
      DivergenceError: If an update is not finite. The run then keeps only the checkpoints that were saved before.
      HostError: If another process failed.
      OSError: If a checkpoint or a row cannot be written, or if a server cannot be used.
    """
    saved = trainer.current.step
    loop = _Loop(trainer, evaluate, checkpoints, tracker, config, audit, logged=saved, saved=saved)
    trainer.experience.num_lost = trainer.current.ahead
    if tracker is not None:
        tracker.show_stages(trainer.timeline)
    stopped, profiler = None, StepProfiler(config.train.profile_steps, Path(config.workdir))
    with trainer.experience.stop.on_signals():
        try:
            await loop.start(is_evaluated)
            for step in range(saved + 1, config.train.num_steps + 1):
                profiler.start_step(step)
                await loop.step(step)
        except DivergenceError as error:
            raise _with_advice(error, loop.saved) from error
        except Stopped as caught:
            stopped = caught
        finally:
            profiler.start_step(0)
            await trainer.experience.close()
            if trainer.progress is not None and trainer.progress.step == loop.logged > loop.saved:
                loop.save()
            checkpoints.close()
        if stopped is not None:
            _exit(stopped, loop.saved)


def _with_advice(error: DivergenceError, saved: int) -> DivergenceError:
    good = f"The checkpoint of step {saved} is valid" if saved else "No checkpoint has been saved yet"
    return DivergenceError(
        f"{error}. The step was not saved. {good}. Rerunning the command would fail in the same way: set "
        "--config.workdir to a new folder and, for example, lower optimizer.learning_rate. model.path may be an export "
        "of a valid checkpoint."
    )


def _exit(stopped: Stopped, saved: int) -> NoReturn:
    kept = f"Saved after step {saved}" if saved else "No step was completed"
    if stopped.reason:  # The exit code differs from that of a signal, after which launchers restart the run.
        raise JudgeError(f"{stopped.reason} {kept}.")
    if hosts.is_first():
        print(f"{stopped}: {kept}. Rerun the command to resume.", file=sys.stderr)
    sys.exit(128 + stopped.number)  # exit status of a process that was terminated by this signal


@dataclasses.dataclass
class _Loop:
    """The loop around the training step. The process that has a tracker writes the records; the others wait for it.

    A resumed run continues from the last checkpoint. It removes the rows of later steps, restores the position in the
    data, and repeats these steps with the same seeds.

    Attributes:
      logged: Last step whose metrics and generations were written.
      saved: Step of the last checkpoint. 0 without a checkpoint.
    """

    trainer: Trainer
    evaluate: Callable[[], Awaitable[Metrics]]
    checkpoints: Checkpoints
    tracker: Tracker | None
    config: Config
    audit: Callable[[int, Sequence[Row]], None] | None
    logged: int
    saved: int

    async def start(self, is_evaluated: bool) -> None:
        """Pushes the initial weights and, unless they have been evaluated, evaluates them."""
        await self.trainer.experience.wait_until_ready()
        await self.trainer.push_weights()
        if self._is_due(self.config.eval.every, self.logged) and not is_evaluated:
            await self._evaluate(self.logged)
            await self._write(lambda tracker: tracker.publish(self.logged))
        self.trainer.timeline.cut(self.logged)  # the first step's time does not include waiting for servers

    async def step(self, step: int) -> None:
        """Trains on one batch, writes its records, pushes the weights and, if due, evaluates and saves them."""
        config, stage = self.config, self.trainer.timeline.clock(step).stage
        batch, metrics = await self.trainer.step(step)
        await self._log(step, batch, metrics)
        self.logged = step  # only a logged step is saved, so a checkpoint is never ahead of the rows
        with stage("sync"):
            await self.trainer.push_weights()
        if self._is_due(config.eval.every, step):
            await self._evaluate(step)
        await self._log_timing(step, batch)
        if step % config.checkpoint.every == 0 or self.checkpoints.is_best(step):
            with stage("checkpoint"):
                self.save()
        if step < config.train.num_steps:
            await hosts.barrier(self.trainer.experience.stop.check())

    def save(self) -> None:
        """Saves a checkpoint of the last completed step."""
        progress = self.trainer.current
        self.checkpoints.save(
            progress.step,
            progress.state,
            {"position": progress.position, "solved": f"{progress.solved:x}", "ahead": progress.ahead},
        )
        self.saved = progress.step

    def _is_due(self, interval: int, step: int) -> bool:
        """Returns True if `step` is a multiple of `interval` or the last step, and `interval` is not 0."""
        return bool(interval) and (step % interval == 0 or step == self.config.train.num_steps)

    async def _evaluate(self, step: int) -> None:
        """Evaluates the policy after a step, and writes the metrics as a row separate from that of the step."""
        with self.trainer.timeline.clock(step).stage("evaluate"):
            metrics = await self.evaluate()
            if math.isfinite(value := metrics.get(self.config.checkpoint.best, math.nan)):
                self.checkpoints.values[step] = value
            await self._write(lambda tracker: tracker.log(step, metrics))

    async def _log(self, step: int, batch: Batch, metrics: Metrics) -> None:
        """Writes the metrics of a trained step and, if due, its generations."""
        config = self.config
        due = self._is_due(config.log.generations_every, step)
        rows = logged_generations([*batch.graded, *batch.left_out], batch.usable, batch.advantages) if due else []
        await self._write(
            lambda tracker: tracker.log_generations(step, rows), lambda tracker: tracker.log(step, metrics)
        )
        if self.audit is not None and self._is_due(config.audit.every, step):
            self.audit(step, rows)

    async def _log_timing(self, step: int, batch: Batch) -> None:
        """Writes the time that the stages of a step took, and publishes everything that was logged of the step."""
        clock, window = self.trainer.timeline.clock(step), self.trainer.timeline.cut(step)
        num_tokens = sum(int(y.loss_mask.sum()) for group in batch.graded for y in group.group.generations)
        timing = {
            "checkpoints/corrupted": float(self.checkpoints.num_corrupted),
            "attention/disabled_kernels": float(len(attention.disabled_kernels)),
            **clock.seconds(),
            "judge/overlap_fraction": clock.overlap_fraction("judge", "generate"),
            **window.exclusive_seconds(),
            "seconds/step": window.seconds,
            "sync/step_fraction": clock.busy("sync").seconds() / window.seconds,
            "tokens_per_second": num_tokens / window.seconds,
        }
        if (held := peak_bytes()) is not None:
            timing["memory/peak_bytes"] = float(held)
        await self._write(
            lambda tracker: tracker.log_timing(step, timing, window.row()), lambda tracker: tracker.publish(step)
        )

    async def _write(self, *records: Callable[[Tracker], None]) -> None:
        async def on_tracker() -> None:
            if self.tracker is not None:
                for write in records:
                    await asyncio.to_thread(write, self.tracker)

        await hosts.barrier(on_tracker())


async def _compute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function on all processes, in a thread, so that the next batch can be generated in the meantime."""
    return await hosts.collective(asyncio.to_thread(function, *arguments))
