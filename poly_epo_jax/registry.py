"""Registries of named components, and the ranges of their options.

Nothing of the package is imported here, so that every other file can use it.
"""

import dataclasses
from typing import TypeVar


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


class Registry(dict[str, Entry]):
    """A dict whose entries cannot be replaced, because this would change runs that refer to them by name."""

    def __setitem__(self, name: str, entry: Entry) -> None:
        """Registers an entry.

        Raises:
          ValueError: If the name is already registered.
        """
        if name in self:
            raise ValueError(f"The name {name!r} is already registered; choose a name other than {', '.join(self)}.")
        super().__setitem__(name, entry)
