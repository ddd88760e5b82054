"""Builds the default configuration, for a method and a machine that are selected by name.

Configuration files start from it. The names follow the file after a colon: --config=configs/polaris.py:grpo,h200x8
"""

from ml_collections import ConfigDict

from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.config.methods import METHOD_PRESETS


def parse_config_string(config_string: str) -> tuple[str, str]:
    """Parses the names after a configuration file.

    Args:
      config_string: At most one key of METHOD_PRESETS and one key of MESHES, in any order, separated by a comma.

    Returns:
      The name of the method ("poly_epo" by default) and of the mesh ("" by default).

    Raises:
      ValueError: If a name is unknown, or if there are two methods or two meshes.
    """
    methods, meshes = [], []
    for word in filter(None, config_string.split(",")):
        if word not in METHOD_PRESETS and word not in MESHES:
            raise ValueError(
                f"Unknown name ':{word}' after the configuration file; choose a method "
                f"({', '.join(METHOD_PRESETS)}), a mesh ({', '.join(MESHES)}), or both, separated by a comma."
            )
        (methods if word in METHOD_PRESETS else meshes).append(word)
    if len(methods) > 1 or len(meshes) > 1:
        raise ValueError(
            f"':{config_string}' after the configuration file has two methods or two meshes; keep one of each."
        )
    return [*methods, "poly_epo"][0], [*meshes, ""][0]


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the default configuration, locked except for the options of components.

    Args:
      config_string: Names of a method and of a mesh, see `parse_config_string`.

    Raises:
      ValueError: If `config_string` is invalid.
    """
    method, mesh = parse_config_string(config_string)
    config = ConfigDict(Config().to_dict())
    config.algo.update(METHOD_PRESETS[method])
    if mesh:
        config.mesh.update({key: value for key, value in MESHES[mesh].items() if key != "processes"})
    config.lock()
    for section in config.values():
        for value in section.values() if isinstance(section, ConfigDict) else ():
            if isinstance(value, ConfigDict):
                value.unlock()  # options: `read_config` checks them against the selected registry entry
    return config
