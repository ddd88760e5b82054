"""Checks the machine of a run: devices, mesh, attention kernel, disk, and the time and memory of a training step."""

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp

from poly_epo_jax.bench.roofline import measure_roofline
from poly_epo_jax.bench.stages import stage_names, stage_row, time_stages
from poly_epo_jax.bench.workload import make_workload
from poly_epo_jax.doctor.runner import CheckResult, Failed, Finding, RunContext, Skipped
from poly_epo_jax.doctor.small_model import random_params, small_config
from poly_epo_jax.memory_plan.plan import machine_of, plan_of
from poly_epo_jax.memory_plan.tables import amount
from poly_epo_jax.model.attention import resolve_implementation
from poly_epo_jax.model.attention.self_check import AttentionCheck, check_attention
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.model.fingerprint import fingerprints
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.devices import device_peak
from poly_epo_jax.parallel.mesh import shown_axes
from poly_epo_jax.startup.prepare import MEMORY_TOLERANCE
from poly_epo_jax.step.update import PolicyUpdate, TrainState, make_update

SIZE = 512  # Side length of the test matrices.
STAGE_SECONDS = 90.0  # No further stage is started after this time, in seconds.
MAX_ROOFLINE_RATIO = 50.0  # Maximum ratio of measured to roofline time. Correctly working kernels are faster.
MIN_ROOFLINE_SECONDS = 0.5  # For a shorter roofline time, launching the programs dominates the time of a step.


def check_devices(run: RunContext) -> CheckResult:
    """Checks the mesh, and a matrix multiplication of small integers, which is exact in every dtype, on each device."""
    mesh, dtype = run.mesh, run.config.model.dtype
    a = jnp.arange(SIZE)[:, None] % 4
    b = jnp.arange(SIZE)[None] % 3
    for device in run.local_mesh.devices.flat:
        x, y = (jax.device_put(jnp.broadcast_to(m, (SIZE, SIZE)).astype(dtype), device) for m in (a, b))
        # Each sum is SIZE times a product of at most 6, which float32, the dtype of the sums, represents exactly.
        found = jnp.matmul(x, y, preferred_element_type=jnp.float32)
        if not bool((found == (SIZE * a * b).astype(jnp.float32)).all()):
            raise Failed(
                f"{device} returns incorrect products of small integers; stop using the device, and test its memory"
            )
    kind = mesh.devices.flat[0].device_kind
    axes = ", ".join(f"{axis} {size}" for axis, size in shown_axes(mesh.shape).items())
    _, memory_bytes = machine_of(run.config)
    memory = f", {amount(memory_bytes)} each for JAX" if memory_bytes else ""
    processes = f" on {hosts.count()} hosts" if hosts.count() > 1 else ""
    return f"{mesh.size} x {kind}{processes}{memory}; mesh {axes}", {"devices": mesh.size, "kind": kind}


def check_kernel(run: RunContext) -> list[Finding]:
    """Compares values and gradients of the run's attention kernel with the reference implementation in float32.

    Each process runs the comparison on its own devices.

    Returns:
      A finding of the kernel and, if the kernel is not the blockwise implementation, a finding of the blockwise
      implementation, which replaces kernels that fail. Their figures are the error and the tolerance of each array,
      regardless of whether the check passed.
    """
    with jax.set_mesh(run.local_mesh):
        implementation = resolve_implementation(run.model_config.attention, any(run.model_config.windows))
    rows = {"kernel": implementation} | ({} if implementation == "blockwise" else {"kernel blockwise": "blockwise"})
    return [_kernel_finding(row, check_attention(name, run.local_mesh, run.model_config)) for row, name in rows.items()]


def _kernel_finding(row: str, found: AttentionCheck) -> Finding:
    figures: dict[str, float | str] = {}
    for name, (error, tolerance) in found.errors.items():
        figures |= {f"error of {name}": error if math.isfinite(error) else str(error), f"allowed of {name}": tolerance}
    if found.passed:
        return Finding(row, "passed", str(found), figures)
    remedy = "set --config.model.attention=blockwise, which is slower, and " * (found.implementation != "blockwise")
    return Finding(row, "failed", f"{found}; {remedy}report the kernel", figures)


def check_checkpoint(run: RunContext) -> CheckResult:
    """Saves the state of a small model on the run's disk, and verifies that it is read back without any changed bits.

    All processes take part.
    """
    mesh, config = run.mesh, run.config
    model_config = small_config(run.model_config, mesh)
    update = make_update(config, abstract_model(model_config), mesh)
    state, workdir = update.init(random_params(model_config, mesh)), Path(config.workdir).absolute()
    disk = next(path for path in (workdir, *workdir.parents) if path.is_dir())
    with contextlib.ExitStack() as held:
        # The folder is also removed if SIGTERM ends this process, because the doctor then exits normally.
        folder = Path(hosts.run_on_first(lambda: held.enter_context(TemporaryDirectory(prefix=".doctor-", dir=disk))))
        started = time.monotonic()
        restored, data = _round_trip(folder, update, state)
        seconds = time.monotonic() - started
    if data != {"step": 1} or fingerprints(restored) != fingerprints(state):
        raise Failed(
            f"a checkpoint in {disk} was read back with changed bits; test the disk before using it for training"
        )
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    return f"{num_bytes / 1e6:.2g} MB written to {disk} and read back unchanged in {seconds:.1f} s", {
        "bytes": num_bytes,
        "seconds": seconds,
    }


def _round_trip(folder: Path, update: PolicyUpdate, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, state, {"step": 1})
    checkpoints.close()
    return Checkpoints(folder / "checkpoints", read_only=True).restore(1, update.abstract_state, update.shardings)


def check_step(run: RunContext) -> list[Finding]:
    """Compares the time of the stages with their roofline, and the peak memory with the memory plan."""
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
    for stage in time_stages(config, model_config, mesh, workload, stage_names(config)):
        if stage.in_step:
            stages.append(stage_row(stage, roofline, mesh.size))
        if time.monotonic() > started + STAGE_SECONDS:
            break
    return [_speed(stages), _memory(plan.peak_bytes)]


def _speed(rows: Sequence[dict]) -> Finding:
    total, bound = sum(row["seconds"] for row in rows), sum(row["roofline_seconds"] for row in rows)
    shown = ", ".join(f"{row['name']} {row['seconds']:.2g}" for row in rows)
    figures = {
        **{f"seconds of {row['name']}": row["seconds"] for row in rows},
        **{f"roofline of {row['name']}": row["roofline_seconds"] for row in rows},
    }
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
