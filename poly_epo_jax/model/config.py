"""Model configuration: architecture and compute options, independent of the model family."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a model, as in a Hugging Face configuration, followed by options of its computation.

    Attributes:
      vocab_size: Number of rows of the embedding.
      hidden_size: Width of the residual stream.
      mlp_size: Width of the hidden layer of the MLP.
      num_layers: Number of decoder layers.
      num_heads: Number of query heads.
      num_kv_heads: Number of key and value heads. It divides `num_heads`.
      head_dim: Width of a head.
      rope_theta: Base of the rotary embedding frequencies.
      norm_eps: Constant added to the mean square in RMS norms.
      max_position: Maximum sequence length stated in the model folder, in tokens.
      tie_word_embeddings: Whether the output head shares the weight of the embedding.
      family: Key of architectures.ARCHITECTURES.
      qk_norm: Whether queries and keys are normalized, as in Qwen3.
      attention_bias: Whether query, key and value projections have biases, as in Qwen2.
      dtype: Type of activations and of weights in matmuls (compute type).
      param_dtype: Type of stored weights. Adapters are always float32.
      remat: Key of transformer.REMAT_POLICIES, or "auto" until a memory plan has chosen one.
      scan_unroll: Layers per iteration of the layer scan. 0 selects all layers if there are at most
        transformer.MAX_UNROLLED_LAYERS, and otherwise 1.
      attention: Key of attention.IMPLEMENTATIONS, or "auto".
      max_sequence_tokens: Maximum number of tokens of a sequence in a packed row. 0 means that only the row length
        limits it. Some kernels do not visit keys beyond this distance.
      lora_rank: Rank of the adapter.
      lora_scale: Factor alpha / rank of the adapter's output, see lora.py.
      lora_targets: Weights that have an adapter, such as ("q", "v"). If empty, the model has no adapter.
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
    tie_word_embeddings: bool = True
    family: str = "qwen3"
    qk_norm: bool = True
    attention_bias: bool = False
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: str = "full"
    scan_unroll: int = 1
    attention: str = "auto"
    max_sequence_tokens: int = 0
    lora_rank: int = 0
    lora_scale: float = 0.0
    lora_targets: tuple[str, ...] = ()
