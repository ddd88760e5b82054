"""Writes a checkpoint to the disk of the run, and verifies that it is read back without any changed bits."""

import contextlib
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from poly_epo_jax.doctor.runner import CheckResult, Failed, RunContext
from poly_epo_jax.doctor.small_model import random_params, small_config
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.model.fingerprint import fingerprints
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel import hosts
from poly_epo_jax.step.update import PolicyUpdate, TrainState, make_update


def check_checkpoint(run: RunContext) -> CheckResult:
    """Saves and restores the state of a small model on the run's disk. All processes take part."""
    mesh, config = run.mesh, run.config
    model_config = small_config(run.model_config, mesh)
    update = make_update(config, abstract_model(model_config), mesh)
    state = update.init(random_params(model_config, mesh))
    workdir = Path(config.workdir).absolute()
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
    figures = {"bytes": num_bytes, "seconds": seconds}
    return f"{num_bytes / 1e6:.2g} MB written to {disk} and read back unchanged in {seconds:.1f} s", figures


def _round_trip(folder: Path, update: PolicyUpdate, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, state, {"step": 1})
    checkpoints.close()
    return Checkpoints(folder / "checkpoints", read_only=True).restore(1, update.abstract_state, update.shardings)
