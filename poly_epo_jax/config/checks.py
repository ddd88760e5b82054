"""Validators for configuration values (types, ranges, formats) and the error messages for invalid values."""

import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union, get_args, get_origin

from poly_epo_jax.registry import Range
from poly_epo_jax.system.text import UNPRINTABLE


class ConfigError(ValueError):
    """Raised when a configuration is invalid. The message names the key and its valid values."""


class Check(NamedTuple):
    """A condition on a value.

    Attributes:
      is_valid: Returns True if a value is valid.
      rule: Predicate of the error message, such as "must not be empty". The subject is `KEY=VALUE`.
    """

    is_valid: Callable[[Any], bool]
    rule: str


# Name of an environment variable. Other texts could be the API key itself, which must not be printed.
VARIABLE = re.compile("[A-Z]+_[A-Z0-9_]+")
FRACTION = Range(0, 1)
SEED = Range(0, 2**32 - 1)
NOT_EMPTY = Check(lambda text: bool(text.strip()), "must not be empty")


def one_of(*allowed: Any) -> Check:
    """Returns a check that a value is one of the allowed values. Its rule does not list an allowed empty string."""
    return Check(lambda value: value in allowed, f"must be one of {', '.join(filter(None, sorted(map(str, allowed))))}")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


PATTERN = Check(_is_pattern, "must be a regular expression")

# A host name or an IPv6 address in brackets, with an optional port.
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")


def _is_address(text: str, needs_port: bool = False) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and (1 <= int(match["port"]) <= 65_535 if match["port"] else not needs_port)


def is_url(text: str) -> bool:
    """Returns True if the text is a server address without user, password, query, fragment or final /v1.

    Clients append paths such as /v1/models to the address.
    """
    match = re.fullmatch(r"https?://([^\s/?#@]+)(?:/[^\s?#@]*)?", text)
    return match is not None and _is_address(match[1]) and not text.rstrip("/").endswith("/v1")


def _are_urls(text: str) -> bool:
    urls = [url.strip().rstrip("/") for url in text.split(",")]
    return all(map(is_url, urls)) and len(set(urls)) == len(urls)


URL = Check(lambda text: not text or is_url(text), "must be an address such as http://127.0.0.1:30001, without /v1")
URLS = Check(
    lambda text: not text or _are_urls(text),
    "must be distinct addresses, separated by commas, such as http://127.0.0.1:30000, without /v1",
)
COORDINATOR = Check(
    lambda text: text in ("", "auto") or _is_address(text, needs_port=True),
    "must be HOST:PORT, with a free port on the host of the first process, or auto under SLURM and on TPU pods",
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
        "must be a string without control characters",
    ),
    type(None): Check(lambda value: value is None, "must be None"),
}
"""Checks of the basic types of configuration keys."""


def check_of_type(declared: Any) -> Check:
    """Returns the check for values of a declared type.

    Supports the types in TYPES, mappings, and tuples, sequences and unions of supported types. Lists are valid tuples.
    For any other type, every value is valid.
    """
    if declared in TYPES:
        return TYPES[declared]
    origin, arguments = get_origin(declared), get_args(declared)
    inner = [check_of_type(argument) for argument in arguments if argument is not ...]
    if origin in (Union, types.UnionType):
        rules = " or ".join(check.rule.removeprefix("must be ") for check in inner)
        return Check(lambda value: any(check.is_valid(value) for check in inner), f"must be {rules}")
    if origin is Mapping:
        return Check(lambda value: isinstance(value, Mapping), "must be a dictionary")
    if origin not in (tuple, Sequence):
        return Check(lambda value: True, "")
    if origin is tuple and ... not in arguments:
        return Check(
            lambda value: (
                isinstance(value, tuple | list)
                and len(value) == len(inner)
                and all(check.is_valid(item) for check, item in zip(inner, value, strict=True))
            ),
            f"must be a list of {len(inner)}: {', '.join(check.rule.removeprefix('must be ') for check in inner)}",
        )
    return Check(
        lambda value: isinstance(value, tuple | list) and all(map(inner[0].is_valid, value)),
        f"must be a list, where each item {inner[0].rule}",
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) for name in value) and all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return any(check.is_valid(value) for check in TYPES.values())


PLAIN = Check(_is_plain, "must consist of strings, finite numbers, True, False, None, lists and dictionaries")
"""Check that a value can be written to config.json."""


def validate(value: Any, key: str, check: Check | Range) -> None:
    """Validates the value of a key.

    Args:
      value: The value.
      key: Dotted key, for the error message.
      check: The check that the value must pass.

    Raises:
      ConfigError: If the value is invalid. The message names the key, the value and the valid values.
    """
    if not check.is_valid(value):
        raise ConfigError(f"{key}={_format_value(value)} {check.rule}.")


def _format_value(value: Any) -> str:
    # Python raises ValueError when it formats an int of thousands of digits in decimal, but not in hexadecimal.
    text = hex(value) if isinstance(value, int) and value.bit_length() > 1000 else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
