"""Base class of configuration sections, whose keys are declared with a type, a default, a help text and a check."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from poly_epo_jax.config.checks import Check, ConfigError, check_of_type, validate
from poly_epo_jax.config.renamed import RENAMED
from poly_epo_jax.registry import Range
from poly_epo_jax.system.text import did_you_mean

S = TypeVar("S", bound="Section")


def key(default: Any, meaning: str, check: Check | Range | None = None) -> Any:
    """Declares a key of a section.

    Args:
      default: Default value.
      meaning: Help text: a noun phrase that names quantity, unit and special values.
      check: Check of the value, in addition to the check of its type.
    """
    metadata = {"meaning": meaning, "check": check}
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Section(Mapping[str, Any]):
    """Base class of the sections. A section is a frozen dataclass and a mapping of its keys: `f(**section)`.

    Attributes:
      NAME: Prefix of the dotted keys.

    Raises:
      ConfigError: If a value has the wrong type or fails the check of its key.
    """

    NAME: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = ""):
        cls.NAME = name

    def __post_init__(self):
        for field in dataclasses.fields(self):
            for check in (check_of_type(field.type), field.metadata.get("check")):
                if check is not None:
                    validate(self[field.name], self.dotted(field.name), check)

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
        """Returns the dotted name of a key, such as `train.num_steps` for `num_steps`."""
        return f"{cls.NAME}.{name}" if cls.NAME else name

    def flat(self) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
        """Yields the dotted name, declaration and value of each key, in the order of the declarations."""
        for field in dataclasses.fields(self):
            value = self[field.name]
            if isinstance(value, Section):
                yield from value.flat()
            else:
                yield self.dotted(field.name), field, value

    def to_dict(self) -> dict[str, Any]:
        """Returns the keys as a dictionary, with a nested dictionary for each section."""
        return {name: value.to_dict() if isinstance(value, Section) else value for name, value in self.items()}


def read_section(kind: type[S], values: Mapping[str, Any]) -> S:
    """Builds a section from a user's values and the defaults of all other keys.

    Args:
      kind: Class of the section.
      values: Values by key. The values of nested sections are mappings.

    Raises:
      ConfigError: If a key is unknown or a value is invalid.
    """
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    arguments = {}
    for name, value in values.items():
        if name not in types:
            dotted = kind.dotted(name)
            hint = f"; it is now {RENAMED[dotted]}." if dotted in RENAMED else did_you_mean(name, types)
            raise ConfigError(f"There is no key {dotted}{hint}")
        inner = types[name]
        if isinstance(inner, type) and issubclass(inner, Section):
            validate(value, name, Check(lambda value: isinstance(value, Mapping), "must be a section"))
            value = read_section(inner, value)
        arguments[name] = value
    return kind(**arguments)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Compares two configurations.

    Args:
      old: First configuration, with a nested mapping for each section.
      new: Second configuration.
      prefix: Prefix of the returned names.

    Returns:
      Dotted names of the keys that differ or that only one of them has, in alphabetical order.
    """
    names = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            names += changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            names.append(prefix + key)
    return names


HIDDEN_KEYS = ("workdir", "compilation_cache_dir", "base.cache_dir")
"""Keys of storage locations, which do not affect the results of a run."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a configuration to a dict of dotted keys, without `HIDDEN_KEYS`. Options are flattened too.

    Args:
      config: The configuration, as nested dicts.
      prefix: Prefix of the keys.
    """
    keys: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[prefix + key] = value
    return {key: value for key, value in keys.items() if key not in HIDDEN_KEYS}
