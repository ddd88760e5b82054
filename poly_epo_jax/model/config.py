"""Model configuration: architecture and compute options, independent of the model family."""

import dataclasses
import itertools
from typing import Any

from poly_epo_jax.model.rope import Rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a model, as in a Hugging Face configuration, followed by options of its computation.

    Attributes:
      vocab_size: Number of rows of the embedding.
      hidden_size: Width of the residual stream.
      mlp_size: Width of the hidden layer of the MLP, or of the MLP of each expert.
      num_layers: Number of decoder layers.
      num_heads: Number of query heads.
      num_kv_heads: Number of key and value heads. It divides `num_heads`.
      head_dim: Width of a head.
      ropes: Rotary position embedding of each layer. A shorter sequence is repeated, so that one element is enough if
        the layers do not differ.
      windows: Number of tokens that a token sees in each layer, including itself. 0 disables the window. A shorter
        sequence is repeated.
      norm_eps: Constant added to the mean square in RMS norms.
      max_position: Maximum sequence length stated in the model folder, in tokens.
      tie_word_embeddings: Whether the output head shares the weight of the embedding.
      family: Key of architectures.ARCHITECTURES.
      qk_norm: Whether queries and keys are normalized, as in Qwen3.
      joint_qk_norm: Whether all heads of a token are normalized together, as in OLMo 2.
      attention_bias: Whether query, key and value projections have biases, as in Qwen2.
      pre_norm: Whether attention and MLP normalize their inputs.
      post_norm: Whether attention and MLP normalize their outputs.
      norm_offset: Number that is added to the weights of norms, 1 in Gemma.
      float32_norm: Whether normalized values are multiplied by the weights of norms in float32, before rounding.
      activation: Key of layer.ACTIVATIONS.
      scale_embeddings: Whether embeddings are multiplied by the square root of `hidden_size`.
      num_experts: Number of experts in place of the MLP, see experts.py. 0 selects a dense MLP.
      experts_per_token: Number of experts that process a token.
      normalize_router: Whether the probabilities of the selected experts are divided by their sum.
      query_size: Number whose square root divides the attention scores. 0 selects `head_dim`.
      gated_attention: Whether the outputs of the attention are multiplied by a sigmoid of a projection of its inputs.
      linear_layers: Whether each layer has linear attention, see linear_attention.py. A shorter sequence is repeated.
      linear_key_heads: Number of query heads, and of key heads, of linear attention.
      linear_value_heads: Number of value heads of linear attention. A multiple of `linear_key_heads`.
      linear_key_dim: Width of a query or key head of linear attention.
      linear_value_dim: Width of a value head of linear attention.
      conv_size: Number of tokens that the convolution of linear attention reads.
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
    ropes: tuple[Rope, ...] = (Rope(),)
    windows: tuple[int, ...] = (0,)
    norm_eps: float = 1e-6
    max_position: int = 32768
    tie_word_embeddings: bool = True
    family: str = "qwen3"
    qk_norm: bool = True
    joint_qk_norm: bool = False
    attention_bias: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    norm_offset: float = 0.0
    float32_norm: bool = False
    activation: str = "silu"
    scale_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    normalize_router: bool = True
    query_size: int = 0
    gated_attention: bool = False
    linear_layers: tuple[bool, ...] = (False,)
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    conv_size: int = 0
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: str = "full"
    scan_unroll: int = 1
    attention: str = "auto"
    max_sequence_tokens: int = 0
    lora_rank: int = 0
    lora_scale: float = 0.0
    lora_targets: tuple[str, ...] = ()

    @property
    def layer_ropes(self) -> tuple[Rope, ...]:
        """Rotary position embedding of each layer."""
        return self._of_layers(self.ropes)

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Window of each layer in tokens, 0 without a window."""
        return self._of_layers(self.windows)

    @property
    def attention_windows(self) -> tuple[int, ...]:
        """Window of each layer that is not a layer with linear attention."""
        return tuple(self.layer_windows[layer] for layer in self.stacks.get("layers", ()))

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the layers with the same weights, by the name under which these weights are stacked."""
        names = ["linear_layers" if linear else "layers" for linear in self._of_layers(self.linear_layers)]
        return {name: tuple(i for i, own in enumerate(names) if own == name) for name in sorted(set(names))}

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Stack of each layer, and its index in this stack."""
        places = {number: (name, index) for name, own in self.stacks.items() for index, number in enumerate(own)}
        return tuple(places[layer] for layer in range(self.num_layers))

    @property
    def periods(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Number of periods of the layers, and the runs of each period: a stack and its number of consecutive layers.

        Layers with the same weights are one run. A model that repeats three layers with linear attention and one with
        attention has the runs (("linear_layers", 3), ("layers", 1)).
        """
        names = [name for name, _ in self.places]
        lengths = (n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0)
        length = next(n for n in lengths if names == names[:n] * (self.num_layers // n))
        runs = tuple((name, len(list(run))) for name, run in itertools.groupby(names[:length]))
        return (self.num_layers // length, runs) if len(runs) > 1 else (1, ((names[0], self.num_layers),))

    @property
    def query_width(self) -> int:
        """Width of the query projection of a head, which includes the gate of the head's outputs."""
        return self.head_dim * (1 + self.gated_attention)

    @property
    def linear_channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values of all heads of linear attention."""
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim

    def _of_layers(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(itertools.islice(itertools.cycle(values), self.num_layers))
