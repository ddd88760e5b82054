"""What a configuration value may be: types, ranges and forms; and the error message if it is something else."""

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union, get_args, get_origin

from poly_epo_jax.system.text import UNPRINTABLE


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key and what it may be."""


class Check(NamedTuple):
    """A condition on a value; `rule` completes the sentence `train.num_steps=0 ...`."""

    holds: Callable[[Any], bool]
    rule: str


@dataclasses.dataclass(frozen=True)
class Range:
    """A check of numbers: the least and the most that make sense, and `other`, a value with a meaning of its own.

    Both limits are finite, so numbers that are not finite are refused too.
    """

    least: int | float
    most: int | float
    other: int | float | None = None

    def holds(self, value: int | float) -> bool:
        return value == self.other or self.least <= value <= self.most

    @property
    def rule(self) -> str:
        other = "" if self.other is None else f"be {_number(self.other)}, or "
        return f"must {other}lie between {_number(self.least)} and {_number(self.most)}"


def _number(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


FRACTION = Range(0, 1)
SEED = Range(0, 2**32 - 1)
NOT_EMPTY = Check(lambda text: bool(text.strip()), "must not be empty")


def one_of(*allowed: Any) -> Check:
    names = ", ".join(filter(None, sorted(map(str, allowed))))
    return Check(lambda value: value in allowed, f"must be one of {names}")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


PATTERN = Check(_is_pattern, "must be a regular expression")

# A host's name, or an IPv6 address in brackets; and a port.
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")


def _is_address(text: str, needs_port: bool = False) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and (1 <= int(match["port"]) <= 65_535 if match["port"] else not needs_port)


def is_url(text: str) -> bool:
    """Whether this can be a server's address, to which paths such as /v1/models are added. It holds no password."""
    match = re.fullmatch(r"https?://([^\s/?#@]+)(?:/[^\s?#@]*)?", text)
    return match is not None and _is_address(match[1]) and not text.rstrip("/").endswith("/v1")


def _are_urls(text: str) -> bool:
    urls = [url.strip().rstrip("/") for url in text.split(",")]
    return all(map(is_url, urls)) and len(set(urls)) == len(urls)


URL = Check(lambda text: not text or is_url(text), "must be an address such as http://127.0.0.1:30001, without /v1")
URLS = Check(
    lambda text: not text or _are_urls(text),
    "must be addresses such as http://127.0.0.1:30000, without /v1, each once, with commas between",
)
COORDINATOR = Check(
    lambda text: text in ("", "auto") or _is_address(text, needs_port=True),
    "is not HOST:PORT; name a free port of the first process's host, or write auto under SLURM and on TPU pods",
)

TYPES = {
    bool: Check(lambda value: isinstance(value, bool), "must be True or False"),
    int: Check(lambda value: isinstance(value, int) and not isinstance(value, bool), "must be a whole number"),
    float: Check(
        lambda value: (
            isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        ),
        "must be a finite number",
    ),
    str: Check(
        lambda value: isinstance(value, str) and not UNPRINTABLE.search(value),
        "must be a text without control characters",
    ),
    type(None): Check(lambda value: value is None, "must be None"),
}
"""The check for each type that a key may be declared with."""


def check_of_type(declared: Any) -> Check:
    """Returns the check of a declared type: one of TYPES, a mapping, or a tuple, sequence or union of those.

    All values of other types are valid. A tuple may be written as a list.
    """
    if declared in TYPES:
        return TYPES[declared]
    origin, arguments = get_origin(declared), get_args(declared)
    inner = [check_of_type(argument) for argument in arguments if argument is not ...]
    if origin in (Union, types.UnionType):
        rules = " or ".join(check.rule.removeprefix("must be ") for check in inner)
        return Check(lambda value: any(check.holds(value) for check in inner), f"must be {rules}")
    if origin is Mapping:
        return Check(lambda value: isinstance(value, Mapping), "must be a dictionary")
    if origin not in (tuple, Sequence):
        return Check(lambda value: True, "")
    if origin is tuple and ... not in arguments:
        return Check(
            lambda value: (
                isinstance(value, tuple | list)
                and len(value) == len(inner)
                and all(check.holds(item) for check, item in zip(inner, value, strict=True))
            ),
            f"must be a list of {len(inner)}: {', '.join(check.rule.removeprefix('must be ') for check in inner)}",
        )
    return Check(
        lambda value: isinstance(value, tuple | list) and all(map(inner[0].holds, value)),
        f"must be a list, each of which {inner[0].rule}",
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) for name in value) and all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return any(check.holds(value) for check in TYPES.values())


PLAIN = Check(_is_plain, "must be made of texts, finite numbers, True, False, None, lists and dictionaries")
"""What config.json can hold."""


def require(value: Any, key: str, check: Check | Range) -> None:
    """Refuses a key's value that does not meet the check.

    Raises:
      ConfigError: naming the key, its value and what it may be.
    """
    if not check.holds(value):
        raise ConfigError(f"{key}={_shown(value)} {check.rule}.")


def _shown(value: Any) -> str:
    # Python refuses to print a number of thousands of digits, except in hexadecimal.
    text = hex(value) if isinstance(value, int) and value.bit_length() > 1000 else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
