"""Runs checks one after another, each for a bounded time. If one fails, the next is run all the same."""

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

Status = Literal["passed", "failed", "not there"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of a check.

    Args:
      seen: one sentence without its full stop; if the check failed, it ends with what to do.
      figures: the measurements, by name.
    """

    name: str
    status: Status
    seen: str
    figures: Mapping[str, float | int | str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


class Missing(Exception):
    """The subject of a check is not there. The message says what, and perhaps how to get it. This is not a failure."""


class Failed(Exception):
    """The check has failed. The message says at what, and what to do."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """The run to check. What several checks need of it is made once.

    Raises, on access to something that cannot be made:
      ValueError, OSError: the message says why and what to do.
    """

    config: Config

    @functools.cached_property
    def shape(self) -> ModelConfig:
        """The model's shape. The model is not downloaded for it."""
        path = self.config.model.path
        if path and not has_preset(path):
            find_model(path, download=False)
        return model_shape(self.config)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The run's mesh, checked for whether the model can be split over it."""
        mesh = make_mesh(**self.config.mesh)
        sizes = dataclasses.asdict(self.shape)
        check_mesh(self.config.mesh, mesh.shape, sizes, row_tokens(self.config))
        return mesh

    @functools.cached_property
    def here(self) -> Mesh:
        """This process's part of the mesh."""
        return host_mesh(self.mesh)

    @functools.cached_property
    def task(self) -> Task:
        return make_task(self.config.task)


Seen = tuple[str, Mapping[str, float | int | str]]
"""The outcome of a check that has passed: a sentence without its full stop, and figures."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A check, which gives one line of the table or more.

    Args:
      run: returns what it has seen, or its findings; raises Missing, Failed, or another error that says what to do.
      seconds: the time after which the check gets the status `late`.
      advice: what to do if the check is late, or ends in an error that does not say.
      needs_mesh: whether there is nothing to check without the mesh and its devices.
      when: the forms of the doctor that include the check.
    """

    name: str
    run: Callable[[Subject], Seen | list[Finding]]
    seconds: float
    advice: str
    needs_mesh: bool = True
    late: Status = "failed"
    when: Literal["both", "short", "full"] = "both"


WITHOUT_MESH = "without the mesh there is nothing to check"


class Examination:
    """The checks of one run.

    Args:
      seconds: the time that all checks may take together; checks after that are not run.
    """

    def __init__(self, subject: Subject, seconds: float):
        self._subject, self._deadline = subject, time.monotonic() + seconds
        self._is_alone = not subject.config.hosts.coordinator  # asking JAX would block if devices hang
        self.hanging = ""  # the check that did not end, whose thread may hold the devices for good

    def findings(self, check: Check) -> list[Finding]:
        """The check's findings. If several hosts run it together, the worst among them."""
        if self._is_alone:
            return asyncio.run(self._own(check))
        # What all compute together, none may begin where another cannot.
        mesh_is_there = not check.needs_mesh or all(hosts.on_each(lambda: _has_mesh(self._subject)))
        everyone = asyncio.run(hosts.gather(self._own(check, mesh_is_there)))
        return [_worst(same) for same in zip(*everyone, strict=False)]

    @property
    def is_told(self) -> bool:
        """Whether this process shows what was found."""
        return self._is_alone or hosts.is_first()

    async def _own(self, check: Check, mesh_is_there: bool = True) -> list[Finding]:
        started, seconds = time.monotonic(), min(check.seconds, self._deadline - time.monotonic())
        if self.hanging and check.needs_mesh:
            found = [Finding(check.name, "not there", f"the check of {self.hanging} still holds the devices")]
        elif seconds <= 0:
            found = [Finding(check.name, "not there", "no time was left for it; run it on an idle machine")]
        elif not mesh_is_there:
            found = [Finding(check.name, "not there", WITHOUT_MESH)]
        else:
            found = await self._bounded(check, seconds)
        spent = time.monotonic() - started
        return [dataclasses.replace(one, seconds=spent / len(found)) for one in found]

    async def _bounded(self, check: Check, seconds: float) -> list[Finding]:
        try:
            async with asyncio.timeout(seconds):
                return await in_daemon_thread(lambda: _called(check, self._subject))
        except TimeoutError:
            self.hanging = check.name
        found = Finding(check.name, check.late, f"it did not end in {seconds:.0f} s; {check.advice}")
        if not self._is_alone:
            # The other hosts may be waiting inside a collective of this check, where nothing reaches them.
            print(f"Process {hosts.index()}: {found.name}: {found.seen}", file=sys.stderr, flush=True)
            os._exit(1)
        return [found]


def _called(check: Check, subject: Subject) -> list[Finding]:
    try:
        if check.needs_mesh and not _has_mesh(subject):
            raise Missing(WITHOUT_MESH)
        found = check.run(subject)
    except Missing as error:
        return [Finding(check.name, "not there", str(error))]
    except (Failed, ValueError, OSError, ImportError) as error:  # their messages say what to do
        return [Finding(check.name, "failed", " ".join(str(error).split()))]
    except Exception as error:  # of any kind: compilers and drivers have many
        return [
            Finding(
                check.name, "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}; {check.advice}"
            )
        ]
    if isinstance(found, list):
        return found
    seen, figures = found
    return [Finding(check.name, "passed", seen, figures)]


def _has_mesh(subject: Subject) -> bool:
    try:
        return bool(subject.mesh)
    except (ValueError, OSError):  # the check of the devices reports it
        return False


def _worst(findings: Sequence[Finding]) -> Finding:
    """Of the findings of all hosts, the first failure, or else the first host's finding."""
    for index, one in enumerate(findings):
        if one.status == "failed":
            return dataclasses.replace(one, seen=f"process {index} of {len(findings)}: {one.seen}")
    return findings[0]
