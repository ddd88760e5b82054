"""Command line of all commands with a configuration: --config, its overrides, flags, --help and --print_config."""

import argparse
import ast
import atexit
import contextlib
import difflib
import faulthandler
import functools
import inspect
import logging
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_origin

from ml_collections import ConfigDict

from poly_epo_jax.config.checks import check_of_type, validate
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.config.options import checks_of, options_of
from poly_epo_jax.config.renamed import RENAMED
from poly_epo_jax.registry import Range
from poly_epo_jax.startup.config_file import load_config
from poly_epo_jax.startup.read_config import KNOWN_NAMES, read_config, refuse_passwords, registry_entries
from poly_epo_jax.system.signals import exit_code

KEY = "--config."
"""Prefix of arguments that override a key of the configuration: --config.KEY=VALUE."""

BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def config_parser(description: str | None) -> argparse.ArgumentParser:
    """Creates a parser with the flags that all commands with a configuration share. Commands add their own flags."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=(description or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--config", default="", metavar="FILE", help="configuration file or recipe, or FILE:METHOD,MACHINE"
    )
    parser.add_argument("--print_config", action="store_true", help="print the configuration, one key per line")
    parser.add_argument("-h", "--help", action="store_true", help="print this help, with the values of --config")
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    run: Callable[[Config, argparse.Namespace], None],
    *errors: type[Exception],
    training: bool = True,
) -> int:
    """Runs a command on the configuration of its command line, and returns the exit code.

    Args:
      parser: A parser from `config_parser`.
      arguments: Arguments of the command. If None, the arguments of the process are used.
      run: Function of the configuration and the parsed flags. Not called with --help or --print_config.
      errors: Exceptions of the command that are reported as a one-line error message, in addition to those of
        `exit_code`.
      training: Whether the configuration must be valid for training.

    Returns:
      0, 1 after an error, or 130 after Ctrl-C.
    """

    def work() -> None:
        flags, config = _parse(parser, sys.argv[1:] if arguments is None else arguments)
        if flags.help:
            parser.epilog = _describe_keys(
                read_config(config, training=False), f"value in {flags.config}" if flags.config else "default"
            )
            print(parser.format_help(), end="")  # `print_help` discards errors
        elif not flags.config:
            raise ConfigError(
                "--config is missing; set it to a configuration file, such as configs/polynomial.py, or to the name of "
                "a recipe, such as polynomial. --help lists the keys."
            )
        elif flags.print_config:
            print("\n".join(f"{key} = {value!r}" for key, _, value in read_config(config, training=False).flat()))
        else:
            run(read_config(config, training), flags)

    if arguments is None:
        faulthandler.enable()
    logging.getLogger("absl").setLevel(logging.WARNING)
    # At exit, all files are written. Ctrl-C would only print tracebacks of the exit handlers of libraries.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    return exit_code(work, argparse.ArgumentError, *errors, failed=1)


def read_arguments(arguments: Sequence[str]) -> Config:
    """Returns the configuration of a training command with these arguments, without running the command.

    Args:
      arguments: --config=FILE and overrides of its keys.

    Raises:
      ConfigError: If an argument, key or value is invalid, with the error message of the command.
      argparse.ArgumentError: If the value of a flag is missing or not allowed.
    """
    return read_config(_parse(config_parser(None), arguments)[1])


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, ConfigDict]:
    """Returns the flags, and the configuration of --config (by default, the default configuration) with overrides."""
    overrides = [_with_value(argument) for argument in arguments if argument.startswith(KEY)]
    flags, unknown = parser.parse_known_args([argument for argument in arguments if not argument.startswith(KEY)])
    if unknown:
        raise ConfigError(unknown_argument(unknown[0], parser))
    config = load_config(flags.config)
    _override(config, overrides)
    return flags, config


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Returns a configuration with further overrides, which are parsed and validated like those of the command line.

    Args:
      config: The configuration.
      overrides: Arguments of the form --config.KEY=VALUE.

    Raises:
      ConfigError: If a key or value is invalid.
    """
    values = ConfigDict(config.to_dict())
    _override(values, [_with_value(override) for override in overrides])
    return read_config(values, training=False)


def _with_value(override: str) -> str:
    if "=" not in override:
        raise ConfigError(f"{override} has no value; write {override}=VALUE.")
    return override


def _override(config: ConfigDict, overrides: Sequence[str]) -> None:
    with config.unlocked(), config.ignore_type():
        for override in overrides:
            _set(config, override)


def _set(config: ConfigDict, override: str) -> None:
    """Sets the key that an override names."""
    key, _, text = override.removeprefix(KEY).partition("=")
    types = {name: field.type for name, field, _ in Config().flat()}
    section, _, name = key.rpartition(".")
    if key not in types and not (section in types and section.endswith("options")):
        near = _similar_keys(key, list(types))
        hint = f"choose from {', '.join(f'config.{other}' for other in near)}" if near else "--help lists the keys"
        hint = f"it is now config.{RENAMED[key]}" if key in RENAMED else hint
        raise ConfigError(f"There is no key config.{key}; {hint}.")
    values = functools.reduce(ConfigDict.__getitem__, filter(None, section.split(".")), config)
    kind = types[key] if key in types else str if isinstance(values.get(name), str) else object
    value = parse_value(text, kind)
    refuse_passwords(value, key)
    validate(value, key, check_of_type(kind))
    values[name] = value


def _similar_keys(key: str, known: Sequence[str]) -> list[str]:
    """Returns the keys that may be meant by an unknown key: those of its section, if it has one, or similar ones."""
    if inner := [other for other in known if other.startswith(f"{key}.")]:
        return inner
    section, _, name = key.rpartition(".")
    own = [other.removeprefix(f"{section}.") for other in known if section and other.startswith(f"{section}.")]
    if not own:
        return difflib.get_close_matches(key, known)
    return [f"{section}.{other}" for other in difflib.get_close_matches(name, own) or own]


def parse_value(text: str, kind: Any) -> Any:
    """Parses the text of an override.

    Text that cannot be parsed is used as a string, which the checks reject unless the key accepts strings.

    Args:
      text: Text after `=`.
      kind: Declared type of the key. Types other than str, bool, int and float are parsed as Python literals. For
        tuples, a value that is not a list or tuple becomes the only item of a tuple.
    """
    if kind is bool or (kind is object and text in ("true", "false")):
        return BOOLEANS.get(text.lower(), text)
    value: Any = text
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = kind(text) if kind in (str, int, float) else ast.literal_eval(text)
    if tuple in (kind, get_origin(kind)):
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    return value


def unknown_argument(argument: str, parser: argparse.ArgumentParser) -> str:
    """Returns the error message for an unknown argument of a command.

    The message suggests keys of the configuration with this name, the new name of a renamed flag, or a similar flag.

    Args:
      argument: The argument. Passwords and keys in it are not repeated.
      parser: Parser of the command.
    """
    # The text before an @ may be a user and password in a server address.
    argument = re.sub("(?<=api_key_env=).+", "NAME", argument)
    name, _, value = (re.sub(r"\S*@", "...@", part) for part in argument.partition("="))
    return f"unknown argument {name}; {_hint(name, value, parser)}."


def _hint(argument: str, value: str, parser: argparse.ArgumentParser) -> str:
    if argument.split(":")[0].endswith(".py"):
        return f"write --config={argument}"
    name = argument.lstrip("-")
    near = [f"{KEY}{key}={value or '...'}" for key, _, _ in Config().flat() if f".config.{key}".endswith(f".{name}")]
    flags = re.findall(r"--[\w-]+", parser.format_help())
    near = (
        near
        or [new for old, new in RENAMED.items() if old == f"--{name}" and new in flags]
        or difflib.get_close_matches(f"--{name}", flags, 1)
    )
    return f"write {' or '.join(near)}" if near else "--help lists the flags and keys"


def _describe_keys(values: Config, origin: str) -> str:
    """Lists all keys by section, with type, value, help text and allowed values."""
    lines = [f"Configuration keys with their type and {origin}. Set a key with {KEY}KEY=VALUE."]
    section, entries = "", registry_entries(values)
    for key, field, value in values.flat():
        if "." in key and key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", f"{section}: {values[section].__doc__}"]
        names, check = KNOWN_NAMES.get(key), field.metadata["check"]
        limits = f"; {check.rule}" if check else ""
        if names:
            limits = f"; one of {', '.join(_with_title(name, names) for name in sorted(filter(None, names)))}"
        if key in entries:
            shown = map(_describe_option, options_of(entries[key]).values())
            limits = f"; options of {entries[key].name}: {', '.join(shown) or 'none'}"
        meaning = f"{getattr(field.type, '__name__', 'dict')}: {field.metadata['meaning']}{limits}"
        lines += textwrap.wrap(f"  {f'{key} = {value!r}':<43} {meaning}", 120, subsequent_indent=" " * 50)
    return "\n".join(lines)


def _with_title(name: str, registry: Collection[str]) -> str:
    """Returns the name of a registry entry, with its title if it has one."""
    title = getattr(registry[name], "title", "") if isinstance(registry, Mapping) else ""
    return f"{name} ({title})" if title else name


def _describe_option(parameter: inspect.Parameter) -> str:
    """Returns the name, default and range of an option."""
    rules = [f" ({check.rule})" for check in checks_of(parameter) if isinstance(check, Range)]
    return "".join([str(parameter.replace(annotation=parameter.empty)), *rules])
