"""The `options` of a part: the keyword arguments of its registry entry, checked before anything is built."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin

from poly_epo_jax.config.checks import PLAIN, Check, ConfigError, Range, check_of_type, require
from poly_epo_jax.system.text import nearest


def options_of(make: Callable[..., Any], num_given: int) -> dict[str, inspect.Parameter]:
    """The options that may be set: the parameters of `make` after the first `num_given`, which the run fills itself."""
    return dict(list(inspect.signature(make).parameters.items())[num_given:])


def checks_of(parameter: inspect.Parameter) -> list[Check | Range]:
    """The checks of an option: its type, and any checks given with the type, as in `Annotated[int, Range(1, 10)]`."""
    declared, checks = parameter.annotation, ()
    if get_origin(declared) is Annotated:
        declared, *checks = get_args(declared)
    return [check_of_type(declared), *checks]


def check_options(key: str, name: str, options: Mapping[str, Any], make: Callable[..., Any], num_given: int) -> None:
    """Refuses options that the part does not take, and missing options that it needs.

    Args:
      key: where the options are set, such as `judge.options`.
      name: the part's name.
      make: its constructor or function.
      num_given: how many of its first parameters are not options.

    Raises:
      ConfigError: naming the option and, if it is unknown, the known ones.
    """
    known = options_of(make, num_given)
    named = {option: parameter for option, parameter in known.items() if parameter.kind is not parameter.VAR_KEYWORD}
    takes_any = len(named) < len(known)
    for option, value in options.items():
        if option not in named and not takes_any:
            raise ConfigError(f"{key} has {option!r}, which {name} does not take{nearest(option, named)}")
        for check in (*(checks_of(named[option]) if option in named else ()), PLAIN):
            require(value, f"{key}.{option}", check)
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConfigError(f"{key} lacks {option!r}, which {name} needs.")
