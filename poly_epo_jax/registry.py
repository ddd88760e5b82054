"""Registries of named components, and the ranges of their options.

Nothing of the package is imported here, so that every other file can use it.
"""

import dataclasses
from functools import partial
from types import FunctionType
from typing import Any, TypeVar


@dataclasses.dataclass(frozen=True)
class Range:
    """A closed interval of numbers. The limits are finite, so infinite values and NaN are invalid.

    Attributes:
      minimum: Minimum value.
      maximum: Maximum value.
      special: Special value outside the interval that is also valid, such as 0 for an automatic choice.
    """

    minimum: int | float
    maximum: int | float
    special: int | float | None = None

    def is_valid(self, value: int | float) -> bool:
        """Returns True if the value is valid."""
        return value == self.special or self.minimum <= value <= self.maximum

    @property
    def rule(self) -> str:
        """Predicate of the error message."""
        other = "" if self.special is None else f"be {_format_number(self.special)}, or "
        return f"must {other}lie between {_format_number(self.minimum)} and {_format_number(self.maximum)}"


def _format_number(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


Entry = TypeVar("Entry")
_METHODS = property | classmethod | staticmethod


class Registry(dict[str, Entry]):
    """A dict whose entries cannot be replaced by other code, because this would change runs that refer to them by name.

    The same code may be registered again, for example by a cell of a notebook that runs twice.
    """

    def __setitem__(self, name: str, entry: Entry) -> None:
        """Registers an entry.

        Raises:
          ValueError: If other code is registered under the name.
        """
        if name in self and _code(self[name]) != _code(entry):
            raise ValueError(f"The name {name!r} is already registered; choose a name other than {', '.join(self)}.")
        super().__setitem__(name, entry)


def _code(value: Any) -> Any:
    """Returns a value that is equal for two functions, classes or dataclasses that the same code defines."""
    if isinstance(value, _METHODS):
        return _code(value.fget if isinstance(value, property) else value.__func__)
    if isinstance(value, type):
        parts = [one for one in vars(value).items() if isinstance(one[1], FunctionType | _METHODS) or one[0][0] != "_"]
        return value.__qualname__, [(name, _code(part)) for name, part in parts]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        # A method that calls super() refers to its class.
        return (
            value.__code__,
            repr(value.__defaults__),
            [cell.__qualname__ if isinstance(cell, type) else _code(cell) for cell in cells],
        )
    if isinstance(value, partial):
        return _code(value.func), repr(value.args), repr(value.keywords)
    if isinstance(value, tuple):
        return [_code(part) for part in value]
    if dataclasses.is_dataclass(value):
        return [_code(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return repr(value)
