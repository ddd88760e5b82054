"""The `options` of a part: the keyword arguments of its registry entry, checked before anything is built."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from poly_epo_jax.config.checks import PLAIN, Check, ConfigError, Range, check_of_type, require
from poly_epo_jax.system.text import nearest


class Entry(NamedTuple):
    """A registry entry that a configuration selects by name.

    Attributes:
      name: Its name in the registry.
      factory: The registered class or function. Its options are the parameters that the run does not pass itself.
      num_given: Number of leading parameters that the run passes itself.
      given: Names of other parameters that the run passes itself, from keys of the same section.
    """

    name: str
    factory: Callable[..., Any]
    num_given: int = 0
    given: tuple[str, ...] = ()


def options_of(entry: Entry) -> dict[str, inspect.Parameter]:
    """Returns the parameters of the entry's factory that are options, by name."""
    parameters = list(inspect.signature(entry.factory).parameters.items())[entry.num_given :]
    return {name: parameter for name, parameter in parameters if name not in entry.given}


def checks_of(parameter: inspect.Parameter) -> list[Check | Range]:
    """The checks of an option: its type, and any checks given with the type, as in `Annotated[int, Range(1, 10)]`."""
    declared, checks = parameter.annotation, ()
    if get_origin(declared) is Annotated:
        declared, *checks = get_args(declared)
    return [check_of_type(declared), *checks]


def check_options(key: str, entry: Entry, options: Mapping[str, Any]) -> None:
    """Checks options against the signature of a registry entry.

    Args:
      key: Dotted key of the options, such as `judge.options`.
      entry: The registry entry that receives the options.
      options: Values of the options, by name.

    Raises:
      ConfigError: If an option is unknown, missing or invalid. The message names it and, if it is unknown, the known
        options.
    """
    known = options_of(entry)
    named = {option: parameter for option, parameter in known.items() if parameter.kind is not parameter.VAR_KEYWORD}
    takes_any = len(named) < len(known)
    for option, value in options.items():
        if option in entry.given:
            raise ConfigError(f"{key} has {option!r}; set {key.rpartition('.')[0]}.{option} instead.")
        if option not in named and not takes_any:
            raise ConfigError(f"{key} has {option!r}, which {entry.name} does not take{nearest(option, named)}")
        for check in (*(checks_of(named[option]) if option in named else ()), PLAIN):
            require(value, f"{key}.{option}", check)
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConfigError(f"{key} lacks {option!r}, which {entry.name} needs.")
