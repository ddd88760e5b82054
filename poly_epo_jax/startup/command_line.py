"""What the commands share: --config and its overrides, --help, --print_config, and errors of one sentence."""

import atexit
import copy
import difflib
import inspect
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from poly_epo_jax.config.checks import Range
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.config.options import checks_of, options_of
from poly_epo_jax.startup.read_config import CHOICES, read_config, registry_entries
from poly_epo_jax.system.signals import heard_ctrl_c

CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "The configuration file, with :method after its name.",
    lock_config=False,
    accept_new_attributes=True,  # for options; other unknown keys are refused
)
PRINT_CONFIG = flags.DEFINE_bool("print_config", False, "Only print the configuration, a key on each line.")
_LOADER = flags.FLAGS["config"].parser
HELP = {"-h", "--h", "-help", "--help", "-helpshort", "--helpshort", "-helpfull", "--helpfull"}


def run_command(
    run: Callable[[Config], None], argv: Sequence[str], *errors: type[Exception], training: bool = True
) -> None:
    """Runs a command on the configuration of its command line; an error is reported in one sentence.

    Args:
      argv: the arguments that `parse_flags` has left over.
      errors: the command's own errors, besides the usual ones; their messages say what to do.
      training: whether the configuration must be fit for training.
    """
    if len(argv) > 1:
        name, _, value = argv[1].partition("=")
        sys.exit(f"Error: unknown argument {_without_password(argv[1])}; {_hint(name, value)}.")
    logging.set_verbosity(logging.WARNING)
    # At exit everything is written, and Ctrl-C would only print tracebacks from libraries that are cleaning up.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        with heard_ctrl_c():
            run(read_config(CONFIG.value, training))
    except KeyboardInterrupt:
        print("Ctrl-C: the same command goes on from what is saved.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError, *errors) as error:
        sys.exit(f"Error: {' '.join(str(error).split())}")


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's flag parser, with one sentence instead of a traceback if a key or value is wrong.

    With --help or --print_config it prints and ends the process.
    """
    parser = _ConfigFile()
    flags.FLAGS["config"].parser = parser
    try:
        asks_help = not HELP.isdisjoint(argv)
        config = _check_keys([arg for arg in argv if arg not in HELP], parser)
        if asks_help:
            print(_help(config))
            sys.exit(0)
        rest = flags.FLAGS(argv)
        if CONFIG.value is None:
            raise ConfigError(
                "--config is missing; give a configuration file, such as configs/polynomial.py, or one of your own "
                "that builds on poly_epo_jax.config.default; --help lists its keys."
            )
        if PRINT_CONFIG.value:
            print("\n".join(f"{key} = {value!r}" for key, _, value in read_config(CONFIG.value, training=False).flat()))
            sys.exit(0)
        return rest
    except flags.UnrecognizedFlagError as error:
        sys.exit(f"Error: unknown flag --{error.flagname}; {_hint(error.flagname, error.flagvalue.partition('=')[2])}.")
    except (flags.Error, ValueError, TypeError, OSError) as error:
        sys.exit(f"Error: {_sentence(error)}")


def read_arguments(arguments: Sequence[str]) -> Config:
    """The configuration that a training command with these arguments would have, without running it.

    Args:
      arguments: --config=FILE and its overrides, nothing else.

    Raises:
      ConfigError: a key or value is wrong; the message is what the command would say.
    """
    argv, alone = ["", *arguments], flags.FlagValues()
    flag = _define(alone, argv)
    alone["config"].parser = _FILES
    try:
        _check_keys(argv, _FILES)
        alone(argv)
    except (flags.Error, ValueError, TypeError, OSError) as error:
        raise ConfigError(_sentence(error)) from error
    return read_config(flag.value)


def _define(values: flags.FlagValues, argv: list[str]) -> flags.FlagHolder:
    return config_flags.DEFINE_config_file(
        "config", None, flag_values=values, lock_config=False, accept_new_attributes=True, sys_argv=argv
    )


def _sentence(error: Exception) -> str:
    """The last line of the error: if a configuration file fails, its traceback comes first."""
    return re.sub(r"^[A-Za-z]+Error: ", "", str(error).splitlines()[-1].strip())


class _ConfigFile(flags.ArgumentParser):
    """Executes a configuration file once although its flag is parsed twice, so that it registers its parts once."""

    def __init__(self):
        self._configs: dict[str, ConfigDict] = {}

    def parse(self, argument: str) -> ConfigDict:
        file = Path(argument.partition(":")[0])
        if not file.is_file():
            folder = file if file.is_dir() else file.parent
            there = ", ".join(sorted(found.name for found in folder.glob("*.py"))) or "none"
            raise ConfigError(f"there is no such file; configuration files in {folder}: {there}.")
        if argument not in self._configs:
            self._configs[argument] = _LOADER.parse(argument)
        return copy.deepcopy(self._configs[argument])


_FILES = _ConfigFile()
"""The files that `read_arguments` has executed."""


def _check_keys(argv: Sequence[str], parser: _ConfigFile) -> ConfigDict | None:
    """The configuration without its overrides, None if no file is named.

    Raises:
      ConfigError: an override names a key that the configuration does not have.
    """
    alone = flags.FlagValues()
    flag = config_flags.DEFINE_config_file("config", None, flag_values=alone, sys_argv=[])
    alone["config"].parser = parser
    overrides = alone(argv, known_only=True)[1:]
    config = flag.value
    if config is None:
        return None
    keys = list(_keys(config))
    for name in (override.lstrip("-").partition("=")[0] for override in overrides):
        section = name.rpartition(".")[0]
        is_option = section in keys and section.endswith("options")
        if name.startswith("config.") and name not in keys and not is_option:
            near = ", ".join(difflib.get_close_matches(name, keys))
            raise ConfigError(f"There is no key {name}; {f'choose from {near}' if near else '--help lists the keys'}.")
    return config


def _keys(config: ConfigDict, section: str = "config") -> Iterator[str]:
    for key, value in config.items():
        yield f"{section}.{key}"
        if isinstance(value, ConfigDict):
            yield from _keys(value, f"{section}.{key}")


def _hint(name: str, value: str) -> str:
    """How to write an unknown flag: a key without --config and its section, or a mistyped flag."""
    keys = [key for key, _, _ in Config().flat() if f".{key}".endswith(f".{name}")]
    shown = _without_password(value) or "..."
    near = [f"config.{key}={shown}" for key in keys] or difflib.get_close_matches(name, list(flags.FLAGS), 1)
    return f"write {' or '.join(f'--{flag}' for flag in near)}" if near else "--help lists the flags and keys"


def _without_password(text: str) -> str:
    """The text with any user and password before an @ replaced, as in a server's address."""
    return re.sub(r"\S*@", "...@", text)


def _named(name: str, registry: Collection[str]) -> str:
    """A part's name, and its title where its registry entry has one."""
    title = getattr(registry[name], "title", "") if isinstance(registry, Mapping) else ""
    return f"{name} ({title})" if title else name


def _option(parameter: inspect.Parameter) -> str:
    """An option's name, its default, and its range where it has one."""
    rules = [f" ({check.rule})" for check in checks_of(parameter) if isinstance(check, Range)]
    return "".join([str(parameter.replace(annotation=parameter.empty)), *rules])


def _help(config: ConfigDict | None) -> str:
    """What the command does, its flags, and every key with its type, its value in `config`, and its meaning."""
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "Flags:"]
    for flag in (
        *flags.FLAGS.get_key_flags_for_module(sys.argv[0]),
        flags.FLAGS["config"],
        flags.FLAGS["print_config"],
    ):
        lines.append(f"  --{flag.name:<20} {flag.help} Default: {flag.default_as_str}.")
    values = Config() if config is None else read_config(config, training=False)
    origin = "default" if config is None else "value in that file"
    lines += ["", f"Keys of the configuration with their type and {origin}, each set by --config.KEY=VALUE:"]
    section, entries = "", registry_entries(values)
    for key, field, value in values.flat():
        if "." in key and key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", f"{section}: {values[section].__doc__}"]
        names, check = CHOICES.get(key), field.metadata["check"]
        limits = f"; {check.rule}" if check else ""
        if names:
            limits = f"; one of {', '.join(_named(name, names) for name in sorted(filter(None, names)))}"
        if key in entries:
            shown = map(_option, options_of(entries[key]).values())
            limits = f"; {entries[key].name} takes {', '.join(shown) or 'none'}"
        meaning = f"{getattr(field.type, '__name__', 'dict')}: {field.metadata['meaning']}{limits}"
        lines += textwrap.wrap(f"  {f'{key} = {value!r}':<43} {meaning}", 120, subsequent_indent=" " * 50)
    return "\n".join(lines)
