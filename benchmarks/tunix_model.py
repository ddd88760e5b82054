"""Converts the configuration of the compared model for Tunix, which only provides named configurations."""

import json
from pathlib import Path

from tunix.models.qwen3.model import ModelConfig, RematConfig  # pyright: ignore[reportMissingImports]


def read_config(folder: str, remat: RematConfig = RematConfig.NONE) -> ModelConfig:
    """Reads the configuration of a model.

    Args:
      folder: Hugging Face folder of the model.
      remat: Rematerialization of the layers.

    Returns:
      Tunix's configuration of the model.
    """
    written = json.loads((Path(folder) / "config.json").read_text())
    return ModelConfig(
        num_layers=written["num_hidden_layers"],
        vocab_size=written["vocab_size"],
        embed_dim=written["hidden_size"],
        hidden_dim=written["intermediate_size"],
        num_heads=written["num_attention_heads"],
        head_dim=written["head_dim"],
        num_kv_heads=written["num_key_value_heads"],
        rope_theta=written["rope_theta"],
        norm_eps=written["rms_norm_eps"],
        use_tied_embedding=written["tie_word_embeddings"],
        remat_config=remat,
    )
