"""The shapes of the dense Qwen3 models by name, so that plans and benchmarks need no copy of their folders."""

from poly_epo_jax.model.config import ModelConfig

PRESETS = {
    # hidden size, MLP size, layers, query heads, tied head. All have 8 key heads, heads of 128, and one vocabulary.
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen3-14B": (5120, 17408, 40, 40, False),
    "Qwen3-32B": (5120, 25600, 64, 64, False),
}


def has_preset(name: str) -> bool:
    """Whether a name on the hub, such as Qwen/Qwen3-4B-Base, is one of PRESETS."""
    return _key(name) in PRESETS


def preset_config(name: str, **compute: object) -> ModelConfig:
    """The shape of one of PRESETS.

    Args:
      compute: the fields of ModelConfig that say how to compute, such as dtype.

    Raises:
      KeyError: it is not one of PRESETS.
    """
    hidden_size, mlp_size, num_layers, num_heads, tied_head = PRESETS[_key(name)]
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=hidden_size,
        mlp_size=mlp_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        tied_head=tied_head,
        **compute,  # pyright: ignore[reportArgumentType]
    )


def _key(name: str) -> str:
    return name.rpartition("/")[2].removesuffix("-Base")
