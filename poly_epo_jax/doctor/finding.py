"""The input of a check, and its findings."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal

from jax.sharding import Mesh

from poly_epo_jax.choices import make_task
from poly_epo_jax.config import Config
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.presets import has_preset
from poly_epo_jax.model.sharding import host_mesh, make_mesh
from poly_epo_jax.parallel.mesh import check_mesh
from poly_epo_jax.policy import find_model
from poly_epo_jax.prepare import model_shape
from poly_epo_jax.rows import row_tokens
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
