"""The `options` of a part: the keyword arguments of what its registry holds, checked before anything is built."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from poly_epo_jax.section import TYPES, ConfigError, nearest, require


def options_of(make: Callable[..., Any], num_given: int) -> dict[str, inspect.Parameter]:
    """What may be said in options: the parameters of `make` after the first `num_given`, which a run fills itself."""
    return dict(list(inspect.signature(make).parameters.items())[num_given:])


def check_options(
    section: str, name: str, options: Mapping[str, Any], make: Callable[..., Any], num_given: int
) -> None:
    """Refuses options that the part does not take, or lacks.

    Args:
      section: where they stand, such as `judge`.
      name: of the part.
      make: its constructor or function.
      num_given: how many of its first parameters are not options.

    Raises:
      ConfigError: naming the option, and those that there are.
    """
    parameters = options_of(make, num_given)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {key: parameter for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    for key, value in options.items():
        if key not in named and not takes_any:
            raise ConfigError(f"{section}.options has {key!r}, which {name} does not take{nearest(key, named)}")
        if key in named and named[key].annotation in TYPES:
            require(value, f"{section}.options.{key}", TYPES[named[key].annotation])
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(f"{section}.options lacks {key!r}, which {name} needs.")
