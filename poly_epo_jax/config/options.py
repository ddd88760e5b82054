"""Validates the `options` of a component, which are keyword arguments of its registry entry, before it is built."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from poly_epo_jax.config.checks import PLAIN, Check, ConfigError, check_of_type, validate
from poly_epo_jax.registry import Range
from poly_epo_jax.system.text import did_you_mean


class Entry(NamedTuple):
    """A registry entry that a configuration selects by name.

    Attributes:
      name: Name of the entry in its registry.
      factory: Registered class or function. Its options are its parameters except `num_given` and `given`.
      num_given: Number of leading parameters that are not options, because the run supplies them.
      given: Names of other parameters that are not options, because they have keys in the same section.
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
    """Returns the checks of an option: one for its type, and those of an `Annotated[int, Range(1, 10)]` annotation."""
    declared, checks = parameter.annotation, ()
    if get_origin(declared) is Annotated:
        declared, *checks = get_args(declared)
    return [check_of_type(declared), *checks]


def check_options(key: str, entry: Entry, options: Mapping[str, Any]) -> None:
    """Validates options against the signature of a registry entry.

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
    accepts_any = len(named) < len(known)
    for option, value in options.items():
        if option in entry.given:
            raise ConfigError(f"{key} has {option!r}; set {key.rpartition('.')[0]}.{option} instead.")
        if option not in named and not accepts_any:
            raise ConfigError(f"{key} has {option!r}, which {entry.name} does not accept{did_you_mean(option, named)}")
        for check in (*(checks_of(named[option]) if option in named else ()), PLAIN):
            validate(value, f"{key}.{option}", check)
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConfigError(f"{key} lacks {option!r}, which {entry.name} requires; set {key}.{option}.")
