"""The sections of a configuration: keys, each declared once with a type, a default, a meaning and a check."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from poly_epo_jax.config.checks import Check, ConfigError, Range, check_of_type, require
from poly_epo_jax.system.text import nearest

S = TypeVar("S", bound="Section")


def key(default: Any, meaning: str, check: Check | Range | None = None) -> Any:
    """A key of a section."""
    metadata = {"meaning": meaning, "check": check}
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Section(Mapping[str, Any]):
    """Base of the sections, which are frozen dataclasses. A section is also a mapping of its keys: `f(**section)`.

    Raises:
      ConfigError: a value does not have its key's type, or is not one that the key may have.
    """

    NAME: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = ""):
        cls.NAME = name

    def __post_init__(self):
        for field in dataclasses.fields(self):
            for check in (check_of_type(field.type), field.metadata.get("check")):
                if check is not None:
                    require(self[field.name], self.dotted(field.name), check)

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(dataclasses.fields(self))

    @classmethod
    def dotted(cls, name: str) -> str:
        """The dotted name of a key, such as `train.num_steps` for `num_steps`."""
        return f"{cls.NAME}.{name}" if cls.NAME else name

    def flat(self) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
        """Each key's dotted name, declaration and value, in the order of the declarations."""
        for field in dataclasses.fields(self):
            value = self[field.name]
            if isinstance(value, Section):
                yield from value.flat()
            else:
                yield self.dotted(field.name), field, value

    def to_dict(self) -> dict[str, Any]:
        """The sections as dictionaries."""
        return {name: value.to_dict() if isinstance(value, Section) else value for name, value in self.items()}


def read_section(kind: type[S], values: Mapping[str, Any]) -> S:
    """A section of the given kind with these values, and with defaults for all other keys.

    Raises:
      ConfigError: there is no such key, or its value is wrong.
    """
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    arguments = {}
    for name, value in values.items():
        if name not in types:
            raise ConfigError(f"There is no key {kind.dotted(name)}{nearest(name, types)}")
        inner = types[name]
        if isinstance(inner, type) and issubclass(inner, Section):
            require(value, name, Check(lambda value: isinstance(value, Mapping), "must be a section"))
            value = read_section(inner, value)
        arguments[name] = value
    return kind(**arguments)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the keys in which two configurations differ."""
    names = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            names += changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            names.append(prefix + key)
    return names
