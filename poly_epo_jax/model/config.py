"""What a model is, whatever its family: its shapes, and how to compute with them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A family, shapes and switches, as in a Hugging Face config; then how to compute.

    Attributes:
      family: a key of architectures.ARCHITECTURES, which says how Hugging Face names the rest.
      qk_norm, attention_bias: the switches between the families' networks.
      dtype: of activations.
      remat: what the backward pass recomputes, a key of qwen3.REMAT_POLICIES; or "auto", before one is chosen.
      scan_unroll: layers per step of the layer scan; 0: one, or all of at most qwen3.FEW_LAYERS.
      attention: a key of attention.IMPLEMENTATIONS, or "auto".
      longest_sequence: the longest in a packed row; 0: as long as the row. Some kernels do not look farther.
      lora_rank, lora_scale, lora_targets: of the adapter, see lora.py. Without targets, such as "q", there is none.
    """

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
    family: str = "qwen3"
    qk_norm: bool = True
    attention_bias: bool = False
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: str = "full"
    scan_unroll: int = 1
    attention: str = "auto"
    longest_sequence: int = 0
    lora_rank: int = 0
    lora_scale: float = 0.0
    lora_targets: tuple[str, ...] = ()
