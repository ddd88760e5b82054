"""Checks that a resumed run has the code of its start: the files that define the components of the user."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.keys import Config
from poly_epo_jax.metrics.evaluation import EVALUATION_METRICS
from poly_epo_jax.records import run_folder
from poly_epo_jax.set_rl import OBJECTIVES
from poly_epo_jax.startup.read_config import registry_entries
from poly_epo_jax.system.digests import file_digests
from poly_epo_jax.system.user_code import LIBRARIES, is_ours
from poly_epo_jax.tasks import TASKS


def check_resume_code(config: Config) -> dict[str, Any]:
    """Checks that the user's code is the same as at the start of the run, or that the configuration accepts changes.

    Args:
      config: Configuration of the command.

    Returns:
      "code": digests of the files by name; "code_changes": the steps after which changes were accepted, with the names
      of the changed files. Both are recorded in about.json.

    Raises:
      ConfigError: If a file has changed, and `checkpoint.accept_changed_code` is not set.
    """
    workdir, files = Path(config.workdir), code_files(config)
    code = dict(zip((file.name for file in files), file_digests(files), strict=True))
    about = run_folder.read_about(workdir) if run_folder.resumable_config(workdir) is not None else {}
    saved, changes = about.get("code", code), about.get("code_changes", [])
    changed = sorted(name for name in code.keys() | saved.keys() if code.get(name) != saved.get(name))
    if changed and not config.checkpoint.accept_changed_code:
        raise ConfigError(
            f"The code of the run in {workdir} has changed since it was started: {', '.join(changed)}. Restore it, set "
            "--config.checkpoint.accept_changed_code=true to continue with the new code, or set --config.workdir to a "
            "new folder."
        )
    if changed:
        changes = [*changes, {"step": max(run_folder.checkpoint_steps(workdir)), "files": changed}]
    return {"code": code} | ({"code_changes": changes} if changes else {})


def code_files(config: Config) -> list[Path]:
    """Returns the files that define components of the run, except files of this package, sorted by name.

    These are the files of the registered functions and classes that the configuration selects, of the `rewards` of the
    task's class, of registered metrics, and of imported modules in the same folders.
    """
    components = [entry.factory for entry in registry_entries(config).values()]
    rewards = getattr(TASKS[config.task.name], "rewards", ())
    components += [
        *(getattr(one, "function", one) for one in (rewards if isinstance(rewards, list | tuple) else [rewards])),
        OBJECTIVES[config.algo.objective].score,
        *(metric.function for metric in EVALUATION_METRICS.values()),
    ]
    defined = {file for component in components for file in _defined_in(component)}
    folders = {file.parent for file in defined}
    imported = {Path(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]}
    return sorted(defined | {file for file in imported if file.suffix == ".py" and file.parent in folders})


def _defined_in(component: Any) -> Iterator[Path]:
    """Yields the files that define a function, or a class and its base classes, except files of this package.

    A decorated function is defined by its decorator and by the function itself, and an instance by its class. Base
    classes and decorators of libraries are excluded.
    """
    while isinstance(component, partial):
        component = component.func
    if hasattr(component, "__wrapped__"):
        yield from _defined_in(component.__wrapped__)
    owner = getattr(component, "__self__", component)
    classes = (owner if isinstance(owner, type) else type(owner)).__mro__
    members = [component, *(member for one in classes for member in vars(one).values())]
    defined = {(one.__globals__["__name__"], one.__code__.co_filename) for one in members if hasattr(one, "__code__")}
    defined |= {(one.__module__, getattr(sys.modules.get(one.__module__), "__file__", None) or "") for one in classes}
    own_package = (getattr(component, "__module__", None) or "").partition(".")[0]
    for module, file in defined:
        is_library = file.startswith(LIBRARIES) and module.partition(".")[0] != own_package
        if not is_ours(module) and not is_library and Path(file).is_file():
            yield Path(file)
