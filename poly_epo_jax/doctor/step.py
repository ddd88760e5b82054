"""Compares the time of a training step with its roofline, and its peak memory with the memory plan."""

import time
from collections.abc import Sequence

import jax

from poly_epo_jax.bench.roofline import measure_roofline
from poly_epo_jax.bench.stages import stage_row, time_stages
from poly_epo_jax.bench.workload import make_workload
from poly_epo_jax.doctor.runner import Finding, RunContext, Skipped
from poly_epo_jax.memory_plan.tables import amount, plan_of
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.devices import device_peak
from poly_epo_jax.startup.prepare import MEMORY_TOLERANCE

STAGE_SECONDS = 90.0  # No further stage is started after this time, in seconds.
MAX_ROOFLINE_RATIO = 50.0  # Maximum ratio of measured to roofline time. Correctly working kernels are faster.
MIN_ROOFLINE_SECONDS = 0.5  # For a shorter roofline time, launching the programs dominates the time of a step.


def check_step(run: RunContext) -> list[Finding]:
    """Measures the stages with random weights and tokens, and then reads the peak memory of the device."""
    if hosts.count() > 1:
        raise Skipped("a step of several processes is not timed; see the run's timing.jsonl")
    config, model_config, mesh = run.config, run.model_config, run.mesh
    plan, _ = plan_of(config, model_config)
    if not plan.fits:
        raise Skipped(
            f"the memory plan needs {amount(plan.needed_bytes)} of {amount(plan.memory_bytes or 0)}; reduce it first"
        )
    roofline = measure_roofline(config.model.dtype)
    workload = make_workload(config, model_config.vocab_size, mesh.shape)
    stages, started = [], time.monotonic()
    for stage in time_stages(config, model_config, mesh, workload):
        stages.append(stage_row(stage, roofline, mesh.size))
        if time.monotonic() > started + STAGE_SECONDS:
            break
    return [_speed(stages), _memory(plan.peak_bytes)]


def _speed(rows: Sequence[dict]) -> Finding:
    total, bound = sum(row["seconds"] for row in rows), sum(row["roofline_seconds"] for row in rows)
    shown = ", ".join(f"{row['name']} {row['seconds']:.2g}" for row in rows)
    figures = {f"seconds of {row['name']}": row["seconds"] for row in rows}
    figures |= {f"roofline of {row['name']}": row["roofline_seconds"] for row in rows}
    message = f"{total:.2g} s per step ({shown}), {bound / total:.0%} of the roofline"
    if bound > MIN_ROOFLINE_SECONDS and total > MAX_ROOFLINE_RATIO * bound:
        remedy = "run python -m poly_epo_jax.bench, and check whether other processes use the devices"
        return Finding("seconds of a step", "failed", f"{message}; {remedy}", figures)
    return Finding("seconds of a step", "passed", message, figures)


def _memory(planned: int) -> Finding:
    name, peak = "memory", device_peak()
    if peak is None:
        message = f"{jax.devices()[0].device_kind} does not report its peak memory; the plan is {amount(planned)}"
        return Finding(name, "skipped", message, {"planned bytes": planned})
    figures = {"planned bytes": planned, "peak bytes": peak}
    message = f"peak memory {amount(peak)}, planned {amount(planned)}"
    if peak > MEMORY_TOLERANCE * planned:
        remedy = f"divide the planned maximum of train.rows_per_device by {MEMORY_TOLERANCE:g}, and report both numbers"
        return Finding(name, "failed", f"{message}; {remedy}", figures)
    return Finding(name, "passed", message, figures)
