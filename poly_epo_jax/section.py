"""What a section of the configuration is: keys, each declared once, with a type, a default, a meaning and a check."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

S = TypeVar("S", bound="Section")


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key and what it may be."""


class Check(NamedTuple):
    """What a value must meet; `rule` completes the sentence `train.num_steps=0 ...`."""

    holds: Callable[[Any], bool]
    rule: str


POSITIVE = Check(lambda value: value > 0, "must be positive")
NOT_NEGATIVE = Check(lambda value: value >= 0, "must not be negative")
FRACTION = Check(lambda value: 0 <= value <= 1, "must lie between 0 and 1")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


PATTERN = Check(_is_pattern, "must be a regular expression")


def one_of(*allowed: Any) -> Check:
    names = ", ".join(filter(None, sorted(map(str, allowed))))
    return Check(lambda value: value in allowed, f"must be one of {names}")


TYPES = {
    bool: Check(lambda value: isinstance(value, bool), "must be True or False"),
    int: Check(lambda value: isinstance(value, int) and not isinstance(value, bool), "must be a whole number"),
    float: Check(lambda value: isinstance(value, int | float) and not isinstance(value, bool), "must be a number"),
    str: Check(lambda value: isinstance(value, str), "must be a text"),
}
"""By the type that a key is declared with; of other types, ml_collections checks what a user writes."""


def require(value: Any, key: str, check: Check) -> None:
    """Refuses a key's value that does not meet the check.

    Raises:
      ConfigError: naming the key, its value and what it may be.
    """
    if not check.holds(value):
        raise ConfigError(f"{key}={value!r} {check.rule}.")


def key(default: Any, meaning: str, check: Check | None = None) -> Any:
    """A key of a section."""
    metadata = {"meaning": meaning, "check": check}
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Section(Mapping[str, Any]):
    """Base of the sections, which are frozen dataclasses. A section is also a mapping of its keys: `f(**section)`.

    Raises:
      ConfigError: a value has another type than its key, or is not one that the key may have.
    """

    NAME: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = ""):
        cls.NAME = name

    def __post_init__(self):
        for field in dataclasses.fields(self):
            for check in (TYPES.get(field.type), field.metadata.get("check")):
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
        """`train.num_steps` of `num_steps`."""
        return f"{cls.NAME}.{name}" if cls.NAME else name

    def flat(self) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
        """Each key by its dotted name, how it is declared, and its value, in the order of the declarations."""
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
    """A section of a kind, with these values, and defaults for the keys that are not among them.

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


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known: the one that may be meant, and all there are."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1)
    listed = ", ".join(names) or "none"
    return f"; did you mean {near[0]}? It takes {listed}." if near else f"; it takes {listed}."


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
