"""The configuration that a user's file starts from: the defaults of keys.py, with a method and a machine by name.

Words after the file's name choose the two: --config=configs/polaris.py:grpo,h200x8
"""

from ml_collections import ConfigDict

from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.machines import MESHES

METHODS = {
    "poly_epo": {"advantages": "marginal_set", "length_normalization": "max"},
    "grpo": {"advantages": "grpo", "length_normalization": "own"},
    "grpo_div": {"advantages": "grpo_div", "length_normalization": "own"},
}
"""The paper's three methods (appendix "Implementation Details"), as keys of the `algo` section."""

WORDS = {**METHODS, "max_rl": {"advantages": "max_rl", "length_normalization": "own"}}
"""The methods that a word can choose: the paper's, and the rival that studies compare with most."""


def parse_words(words: str) -> tuple[str, str]:
    """(one of WORDS, one of MESHES or "") from `words`, which names at most one of each, separated by a comma."""
    methods, meshes = [], []
    for word in filter(None, words.split(",")):
        if word not in WORDS and word not in MESHES:
            raise ValueError(
                f"Unknown word ':{word}' after the config file; choose a method ({', '.join(WORDS)}), a mesh "
                f"({', '.join(MESHES)}), or both, with a comma between."
            )
        (methods if word in WORDS else meshes).append(word)
    if len(methods) > 1 or len(meshes) > 1:
        raise ValueError(f"':{words}' after the config file names two methods or two meshes; name one of each at most.")
    return [*methods, "poly_epo"][0], [*meshes, ""][0]


def get_config(words: str = "poly_epo") -> ConfigDict:
    """The defaults for one of WORDS and one of MESHES."""
    method, mesh = parse_words(words)
    config = ConfigDict(Config().to_dict())
    config.algo.update(WORDS[method])
    if mesh:
        config.mesh.update({key: value for key, value in MESHES[mesh].items() if key != "processes"})
    config.lock()
    for section in config.values():
        for value in section.values() if isinstance(section, ConfigDict) else ():
            if isinstance(value, ConfigDict):
                value.unlock()  # options: read_config checks them against the registry entry that the user selects
    return config
