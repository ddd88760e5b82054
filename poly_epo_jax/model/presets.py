"""Architectures of the Qwen3 models, so that memory plans and benchmarks do not require their model folders."""

from typing import Any

from poly_epo_jax.model.config import ModelConfig

PRESETS = {
    # Hidden size, MLP size, layers, query heads, tied head. All models have head width 128 and the same vocabulary.
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen3-14B": (5120, 17408, 40, 40, False),
    "Qwen3-32B": (5120, 25600, 64, 64, False),
    "Qwen3-30B-A3B": (2048, 768, 48, 32, False),
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {"family": "qwen3_moe", "num_experts": 128, "experts_per_token": 8, "num_kv_heads": 4}
}
"""Further fields of mixtures of experts. Dense models have 8 key heads."""


def has_preset(name: str) -> bool:
    """Returns True if a Hugging Face Hub name, such as `Qwen/Qwen3-4B-Base`, is in PRESETS."""
    return _key(name) in PRESETS


def preset_config(name: str, **compute: object) -> ModelConfig:
    """Returns the model configuration of a preset.

    Args:
      name: Hugging Face Hub name, with or without the organization and the suffix `-Base`.
      **compute: Compute options of ModelConfig, such as dtype.

    Returns:
      The model configuration.

    Raises:
      KeyError: If the model is not in PRESETS.
    """
    hidden_size, mlp_size, num_layers, num_heads, tie_word_embeddings = PRESETS[_key(name)]
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=hidden_size,
        mlp_size=mlp_size,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=128,
        tie_word_embeddings=tie_word_embeddings,
        **{"num_kv_heads": 8} | MIXTURES.get(_key(name), {}) | compute,  # pyright: ignore[reportArgumentType]
    )


def _key(name: str) -> str:
    return name.rpartition("/")[2].removesuffix("-Base")
