"""Builds the default configuration, for a method and a machine that are selected by name.

Configuration files start from it. The names follow the file after a colon: --config=configs/polaris.py:grpo,h200x8
"""

from collections.abc import Collection

from ml_collections import ConfigDict

from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.config.methods import METHOD_PRESETS


def parse_config_string(config_string: str, **further: Collection[str]) -> tuple[str, ...]:
    """Parses the names after a configuration file.

    Args:
      config_string: At most one name of each kind, in any order, separated by commas. The kinds are methods (keys of
        METHOD_PRESETS), meshes (keys of MESHES), and those of `further`.
      **further: Names of further kinds that the configuration file accepts, such as `model=("0.6b", "1.7b")`.

    Returns:
      The name of the method ("poly_epo" by default), of the mesh ("" by default) and of each further kind, in their
      order ("" by default).

    Raises:
      ValueError: If a name is unknown, or if there are two names of a kind.
    """
    kinds = {"method": METHOD_PRESETS, "mesh": MESHES, **further}
    found = dict.fromkeys(kinds, "")
    for word in filter(None, config_string.split(",")):
        kind = next((kind for kind, names in kinds.items() if word in names), None)
        if kind is None:
            known = ", ".join(f"a {kind} ({', '.join(names)})" for kind, names in kinds.items())
            raise ValueError(
                f"Unknown name ':{word}' after the configuration file; choose {known}, or several of them, separated "
                "by commas."
            )
        if found[kind]:
            raise ValueError(
                f"':{config_string}' after the configuration file selects more than one {kind}, {found[kind]} and "
                f"{word}; keep one."
            )
        found[kind] = word
    method, *others = found.values()
    return method or "poly_epo", *others


def get_config(config_string: str = "poly_epo", **further: Collection[str]) -> ConfigDict:
    """Returns the default configuration, locked except for the options of components.

    Args:
      config_string: Names of a method and of a mesh, see `parse_config_string`.
      **further: Names of further kinds, which do not affect the default configuration.

    Raises:
      ValueError: If `config_string` is invalid.
    """
    method, mesh, *_ = parse_config_string(config_string, **further)
    config = ConfigDict(Config().to_dict())
    config.algo.update(METHOD_PRESETS[method])
    config.train.refill = method == "dapo"  # dynamic sampling
    if mesh:
        config.mesh.update({key: value for key, value in MESHES[mesh].items() if key != "processes"})
    config.lock()
    for section in config.values():
        for value in section.values() if isinstance(section, ConfigDict) else ():
            if isinstance(value, ConfigDict):
                value.unlock()  # options: `read_config` checks them against the selected registry entry
    return config
