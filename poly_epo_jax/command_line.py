"""The --config flag that main and evaluate share, and one sentence in place of a traceback where it is wrong."""

import difflib
import re
import sys
from collections.abc import Iterator, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from poly_epo_jax.config import ConfigError

CONFIG = config_flags.DEFINE_config_file("config", None, "The configuration file, with :method after its name.")


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's flag parser, with one sentence in place of a traceback where a key or value is wrong."""
    try:
        _check_keys(argv)
        rest = flags.FLAGS(argv)
        if CONFIG.value is None:
            raise ConfigError(
                "--config is missing; give a configuration file, such as configs/polynomial.py, or one that builds on "
                "poly_epo_jax/default_config.py."
            )
        return rest
    except (flags.Error, ValueError, TypeError, OSError) as error:
        # Where a configuration file fails, its traceback comes first.
        sys.exit(f"Error: {re.sub(r'^[A-Za-z]+Error: ', '', str(error).splitlines()[-1].strip())}")


def _check_keys(argv: Sequence[str]) -> None:
    """Refuses a --config.KEY that the configuration file does not have, and names those that may be meant."""
    alone = flags.FlagValues()
    config = config_flags.DEFINE_config_file("config", None, flag_values=alone, sys_argv=[])
    overrides = alone(argv, known_only=True)[1:]
    if config.value is None:
        return
    config.value.lock()  # where the file could not be read, any use of the configuration says so
    keys = list(_keys(config.value))
    for name in (override.lstrip("-").partition("=")[0] for override in overrides):
        if name.startswith("config.") and name not in keys:
            near = difflib.get_close_matches(name, keys) or ["those in poly_epo_jax/default_config.py"]
            raise ConfigError(f"There is no key {name}; choose from {', '.join(near)}.")


def _keys(config: ConfigDict, section: str = "config") -> Iterator[str]:
    for key, value in config.items():
        yield f"{section}.{key}"
        if isinstance(value, ConfigDict):
            yield from _keys(value, f"{section}.{key}")
