"""Parts by name."""

from typing import TypeVar

Part = TypeVar("Part")


class Registry(dict[str, Part]):
    """A dict in which a taken name cannot be given to another part, as runs that name it would silently change."""

    def __setitem__(self, name: str, part: Part) -> None:
        """Registers a part.

        Raises:
          ValueError: the name is taken.
        """
        if name in self:
            raise ValueError(f"There is a part named {name!r} already; choose another name than {', '.join(self)}.")
        super().__setitem__(name, part)
