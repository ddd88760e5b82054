"""What a model is, whatever its family: its shapes, and how to compute with them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes as in a Hugging Face config; then how to compute: types, remat, layers per scan step, kernel."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    max_position: int = 32768
    tied_head: bool = True
    qk_norm: bool = True
    attention_bias: bool = False
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: str = "full"
    scan_unroll: int = 1
    attention: str = "auto"
