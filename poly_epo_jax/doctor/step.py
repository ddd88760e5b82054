"""A step of the run's own model: the time of its stages against their roofline, and its memory against the plan."""

import time
from collections.abc import Sequence

import jax

from poly_epo_jax.bench.roofline import measure_roofline
from poly_epo_jax.bench.stages import stage_row, time_stages
from poly_epo_jax.bench.workload import make_workload
from poly_epo_jax.doctor.examine import Finding, Missing, Subject
from poly_epo_jax.memory_plan.tables import amount, plan_of
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.devices import device_peak
from poly_epo_jax.startup.prepare import TOLERANCE

SECONDS = 90.0  # after which no further stage is started
SLOWEST = 50.0  # times its roofline: slower than any kernel that works as it should
LEAST = 0.5  # seconds of a step's roofline; below that, the time to launch its programs dominates a step


def check_step(subject: Subject) -> list[Finding]:
    """Times the stages with random weights and tokens, then asks the device for its peak memory."""
    if hosts.count() > 1:
        raise Missing("one host is timed, not several; see the run's timing.jsonl")
    config, shape, mesh = subject.config, subject.shape, subject.mesh
    plan, _ = plan_of(config, shape)
    if not plan.fits:
        raise Missing(f"the plan takes {amount(plan.needed_bytes)} of {amount(plan.memory_bytes or 0)}; lower it first")
    roofline = measure_roofline(config.model.dtype)
    workload = make_workload(config, shape.vocab_size, mesh.shape)
    stages, started = [], time.monotonic()
    for stage in time_stages(config, shape, mesh, workload):
        stages.append(stage_row(stage, roofline, mesh.size))
        if time.monotonic() > started + SECONDS:
            break
    return [_speed(stages), _memory(plan.peak_bytes)]


def _speed(rows: Sequence[dict]) -> Finding:
    total, bound = sum(row["seconds"] for row in rows), sum(row["roofline_seconds"] for row in rows)
    shown = ", ".join(f"{row['name']} {row['seconds']:.2g}" for row in rows)
    figures = {f"seconds of {row['name']}": row["seconds"] for row in rows}
    figures |= {f"roofline of {row['name']}": row["roofline_seconds"] for row in rows}
    seen = f"{total:.2g} s a step ({shown}), {bound / total:.0%} of the roofline"
    if bound > LEAST and total > SLOWEST * bound:
        advice = "see python -m poly_epo_jax.bench, and whether other work is on the devices"
        return Finding("seconds of a step", "failed", f"{seen}; {advice}", figures)
    return Finding("seconds of a step", "passed", seen, figures)


def _memory(planned: int) -> Finding:
    name, held = "memory", device_peak()
    if held is None:
        seen = f"{jax.devices()[0].device_kind} does not say what it held; the plan is {amount(planned)}"
        return Finding(name, "not there", seen, {"planned bytes": planned})
    figures, seen = {"planned bytes": planned, "peak bytes": held}, f"{amount(held)} held, {amount(planned)} planned"
    if held > TOLERANCE * planned:
        advice = f"take {TOLERANCE:g} times less than the plan allows of train.rows_per_device, and report both"
        return Finding(name, "failed", f"{seen}; {advice}", figures)
    return Finding(name, "passed", seen, figures)
