"""Runs checks one after another, each with a time limit. The remaining checks run even if one fails."""

import asyncio
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from jax.sharding import Mesh

from poly_epo_jax.config.keys import Config
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.policy import find_model
from poly_epo_jax.model.presets import has_preset
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.mesh import check_mesh
from poly_epo_jax.parallel.sharding import host_mesh, make_mesh
from poly_epo_jax.startup.prepare import model_shape
from poly_epo_jax.startup.read_config import make_task
from poly_epo_jax.step.packing import row_tokens
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.types import Task

Status = Literal["passed", "failed", "skipped"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row of the doctor's table.

    Attributes:
      name: Name of the check or of the part that it checked.
      status: Outcome of the check.
      message: Message without its final period. The message of a failed check ends with a remedy.
      figures: Measurements by name.
      seconds: Duration of the check, in seconds.
    """

    name: str
    status: Status
    message: str
    figures: Mapping[str, float | int | str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


class Skipped(Exception):
    """Raised when the subject of a check does not exist. The check is skipped, which is not a failure."""


class Failed(Exception):
    """Raised when a check fails. The message contains the reason and a remedy."""


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The run that is checked, with objects that several checks share.

    Properties are computed on first access, and raise ValueError or OSError if that fails.

    Attributes:
      config: Configuration of the run.
    """

    config: Config

    @functools.cached_property
    def model_config(self) -> ModelConfig:
        """Configuration of the model. The model is not downloaded."""
        path = self.config.model.path
        if path and not has_preset(path):
            find_model(path, download=False)
        return model_shape(self.config)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Mesh of the run. Raises ConfigError if the model cannot be sharded over it."""
        mesh = make_mesh(**self.config.mesh)
        check_mesh(self.config.mesh, mesh.shape, dataclasses.asdict(self.model_config), row_tokens(self.config))
        return mesh

    @functools.cached_property
    def local_mesh(self) -> Mesh:
        """Part of the mesh that consists of this process's devices."""
        return host_mesh(self.mesh)

    @functools.cached_property
    def task(self) -> Task:
        """Task of the run."""
        return make_task(self.config.task)


CheckResult = tuple[str, Mapping[str, float | int | str]]
"""Result of a check that passed: a message without its final period, and measurements by name."""


@dataclasses.dataclass(frozen=True)
class DoctorCheck:
    """A check, which adds one or more rows to the table.

    Attributes:
      name: Name of the check.
      run: Function that returns a result or findings. It raises `Skipped`, `Failed`, or an error whose message contains
        a remedy.
      timeout_seconds: Time limit of the check, in seconds.
      remedy: Remedy that is printed if the check times out or raises an unexpected exception.
      needs_mesh: Whether the check requires the mesh and its devices.
      uses_devices: Whether the check may still use the devices after it timed out. Later checks that require the mesh
        are then skipped.
      status_on_timeout: Status of the check if it times out.
      when: Forms of the doctor that include the check.
    """

    name: str
    run: Callable[[RunContext], CheckResult | list[Finding]]
    timeout_seconds: float
    remedy: str
    needs_mesh: bool = True
    uses_devices: bool = True
    status_on_timeout: Status = "failed"
    when: Literal["both", "short", "full"] = "both"


class CheckRunner:
    """Runs the checks of one run.

    Args:
      run: Run to check.
      timeout_seconds: Time limit of all checks together, in seconds. Checks after this time are skipped.
    """

    def __init__(self, run: RunContext, timeout_seconds: float):
        self._run, self._deadline = run, time.monotonic() + timeout_seconds
        # Querying JAX instead would block if the devices hang.
        self._is_single = not run.config.hosts.coordinator_address
        self.timed_out = list[DoctorCheck]()  # Their threads may still be running.

    def findings(self, check: DoctorCheck) -> list[Finding]:
        """Runs a check and returns its findings, or the worst findings of all processes that run it together."""
        if self._is_single:
            return asyncio.run(self._findings(check))
        # No process may start a joint computation if another process cannot take part.
        has_mesh = not check.needs_mesh or all(hosts.gather_from_all(lambda: _has_mesh(self._run)))
        return [_worst(same) for same in zip(*asyncio.run(hosts.gather(self._findings(check, has_mesh))), strict=False)]

    @property
    def is_reporter(self) -> bool:
        """True if this process prints the findings."""
        return self._is_single or hosts.is_first()

    async def _findings(self, check: DoctorCheck, has_mesh: bool = True) -> list[Finding]:
        started, seconds = time.monotonic(), min(check.timeout_seconds, self._deadline - time.monotonic())
        blocking = [other.name for other in self.timed_out if other.uses_devices]
        if blocking and check.needs_mesh:
            found = [
                Finding(check.name, "skipped", f"the check {blocking[0]!r} timed out and may still use the devices")
            ]
        elif seconds <= 0:
            found = [Finding(check.name, "skipped", "no time was left; run the doctor on an idle machine")]
        else:
            found = await self._run_with_timeout(check, seconds, has_mesh)
        spent = time.monotonic() - started
        return [dataclasses.replace(one, seconds=spent / len(found)) for one in found]

    async def _run_with_timeout(self, check: DoctorCheck, seconds: float, has_mesh: bool) -> list[Finding]:
        try:
            async with asyncio.timeout(seconds):
                return await in_daemon_thread(lambda: _run_check(check, self._run, has_mesh))
        except TimeoutError:
            self.timed_out.append(check)
        found = Finding(
            check.name, check.status_on_timeout, f"the check timed out after {seconds:.0f} s; {check.remedy}"
        )
        if not self._is_single:
            # The other processes may be blocked in a collective of this check and cannot be notified.
            print(f"Process {hosts.index()}: {found.name}: {found.message}", file=sys.stderr, flush=True)
            os._exit(1)
        return [found]


def _run_check(check: DoctorCheck, run: RunContext, has_mesh: bool) -> list[Finding]:
    try:
        if not has_mesh or (check.needs_mesh and not _has_mesh(run)):
            raise Skipped("this check requires the mesh, which cannot be created")
        found = check.run(run)
    except Skipped as error:
        return [Finding(check.name, "skipped", str(error))]
    except (Failed, ValueError, OSError, ImportError) as error:  # The messages of these errors contain a remedy.
        return [Finding(check.name, "failed", " ".join(str(error).split()).removesuffix("."))]
    except Exception as error:  # Compilers and drivers raise many kinds of exceptions.
        return [
            Finding(
                check.name, "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}; {check.remedy}"
            )
        ]
    if isinstance(found, list):
        return found
    message, figures = found
    return [Finding(check.name, "passed", message, figures)]


def _has_mesh(run: RunContext) -> bool:
    try:
        return bool(run.mesh)
    except (ValueError, OSError):  # The check of the devices reports this error.
        return False


def _worst(findings: Sequence[Finding]) -> Finding:
    """Returns the first failed finding of all processes or, if there is none, the finding of the first process."""
    failed = (
        dataclasses.replace(one, message=f"process {index} of {len(findings)}: {one.message}")
        for index, one in enumerate(findings)
        if one.status == "failed"
    )
    return next(failed, findings[0])
