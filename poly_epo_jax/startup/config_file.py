"""Loads the configuration file of --config, and names the file, line and key of mistakes in it."""

import functools
import inspect
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from poly_epo_jax.config import default
from poly_epo_jax.config.checks import PLAIN, validate
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.config.methods import METHOD_PRESETS
from poly_epo_jax.config.recipes import find_file
from poly_epo_jax.config.section import read_section
from poly_epo_jax.startup.read_config import refuse_passwords

# FILE or FILE:METHOD,MACHINE. Folders of files may contain colons; names of recipes may not.
_VALUE = re.compile(r"(?P<file>.*\.py(?=:|$)|[^:]*)(?::(?P<names>.*))?", re.DOTALL)


def load_config(text: str) -> ConfigDict:
    """Returns the configuration that the value of --config selects.

    Args:
      text: FILE or FILE:METHOD,MACHINE, where FILE is the path of a configuration file or the name of a recipe. Without
        FILE, the default configuration is returned.

    Raises:
      ConfigError: If FILE does not exist, or does not return a configuration.
      ValueError: If a method or machine is unknown.
    """
    match = _VALUE.fullmatch(text)
    assert match is not None
    file, config_string = match["file"], [] if match["names"] is None else [match["names"]]
    if not file:
        return default.get_config(*config_string)
    try:
        path = find_file(os.path.expanduser(file), "configs")
    except ConfigError:
        if METHOD_PRESETS.keys() | MESHES.keys() >= set(file.split(",")):
            raise ConfigError(
                f'{file} is not a recipe, but a method or machine; write ":{file}" for the default configuration, or '
                f'append it to a recipe, as in "polynomial:{file}".'
            ) from None
        raise
    try:
        config = _call_get_config(path, config_string)
        values = config.to_dict()
        refuse_passwords(values)  # first, because other error messages contain values
        for key, _, value in read_section(Config, values).flat():
            validate(value, key, PLAIN)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        lines = [line for frame, line in frames if frame.f_code.co_filename == str(path.absolute())]
        if not lines or not frames[-1][0].f_globals["__name__"].startswith("ml_collections"):
            raise  # a mistake in other code, which the traceback shows
        reason = str(error.args[0]).partition(" Other fields present")[0].strip("'\n ").replace("\n", ". ")
        raise ConfigError(f"{path}, line {lines[-1]}: {reason}; --help lists the keys and their types.") from error
    return config


def _call_get_config(path: Path, config_string: Sequence[str]) -> ConfigDict:
    """Returns the configuration of a file. Raises ConfigError if the file does not return one."""
    get_config = _get_config(path)
    if get_config is None:
        raise ConfigError("the file does not define get_config(); define it, and return a ConfigDict.")
    try:
        inspect.signature(get_config).bind(*config_string)
    except TypeError:
        given = f"get_config() does not accept :{config_string[0]}; " if config_string else ""
        raise ConfigError(f'{given}define get_config(config_string=""), as in configs/polynomial.py.') from None
    config = get_config(*config_string)
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"get_config() returned a value of type {type(config).__name__}; return a ConfigDict.")
    return config


@functools.cache
def _get_config(file: Path) -> Callable[..., Any] | None:
    """Executes a configuration file once, because it may register components, and returns its `get_config`, if any."""
    name = f"config_{file.stem}"
    module = sys.modules[name] = ModuleType(name)  # so that objects of its classes can be pickled
    vars(module).update(runpy.run_path(str(file.absolute()), run_name=name))
    return getattr(module, "get_config", None)
