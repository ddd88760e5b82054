"""Registry of model families, keyed by the `model_type` of Hugging Face configurations.

Each entry maps the configuration keys and weight names of the family to the names of this package, and lists the
settings that are not supported. A further family with the same network requires one entry, which a configuration file
can add:

    ARCHITECTURES["mistral"] = dataclasses.replace(
        LLAMA, class_name="MistralForCausalLM", unsupported=LLAMA.unsupported | {"sliding_window": bool}
    )

A family with a different network also requires a new weight in transformer.py or a new switch in ModelConfig, which
layer.py implements.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from poly_epo_jax.types import Registry


@dataclasses.dataclass(frozen=True)
class Weight:
    """Name of a weight in Hugging Face files, and its axes in both layouts.

    For example, axes "dnh" and hf_axes "nh d" describe a weight of shape [hidden, heads, head_dim] in this package and
    [heads * head_dim, hidden] in Hugging Face files.

    Attributes:
      name: Hugging Face name. `{}` stands for the layer number.
      axes: Axes in this package, one letter per axis. The layer axis is omitted.
      hf_axes: Axes in Hugging Face files, one word per axis. A word with several letters is a merged axis.
    """

    name: str
    axes: str
    hf_axes: str

    def hf_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in Hugging Face files of a weight that has `shape` in this package."""
        size = dict(zip(self.axes, shape, strict=True))
        return tuple(math.prod(size[letter] for letter in word) for word in self.hf_axes.split())

    def export(self, weight: Any) -> Any:
        """Converts a NumPy or JAX array to the Hugging Face layout."""
        order = [self.axes.index(letter) for letter in self._letters]
        return weight.transpose(order).reshape(self.hf_shape(weight.shape))

    def restore(self, hf_weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Converts an array from the Hugging Face layout. Inverse of `export`.

        Args:
          hf_weight: Weight in the Hugging Face layout.
          shape: Shape of the weight in this package, without the layer axis.

        Returns:
          The weight in the layout of this package.
        """
        size = dict(zip(self.axes, shape, strict=True))
        order = [self._letters.index(letter) for letter in self.axes]
        return hf_weight.reshape([size[letter] for letter in self._letters]).transpose(order)

    @property
    def _letters(self) -> str:
        return self.hf_axes.replace(" ", "")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model family.

    Attributes:
      class_name: Class name of the family's language model in transformers.
      switches: Values of the ModelConfig fields in which the networks of the families differ.
      config_keys: Key in config.json of each ModelConfig field that is read from it.
      weights: Weights, keyed by dotted path in the parameter tree, such as `layers.q`.
      unsupported: Predicates, keyed by key in config.json. A predicate receives the value of the key and returns True
        if the model is not supported.
    """

    class_name: str
    switches: dict[str, bool]
    config_keys: dict[str, str]
    weights: dict[str, Weight]
    unsupported: dict[str, Callable[[Any], bool]]


LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    switches={"qk_norm": False, "attention_bias": False},
    config_keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "mlp_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "norm_eps": "rms_norm_eps",
        "max_position": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    weights={
        "embed": Weight("model.embed_tokens.weight", "vd", "v d"),
        "layers.attention_norm": Weight("model.layers.{}.input_layernorm.weight", "d", "d"),
        "layers.q": Weight("model.layers.{}.self_attn.q_proj.weight", "dnh", "nh d"),
        "layers.k": Weight("model.layers.{}.self_attn.k_proj.weight", "dnh", "nh d"),
        "layers.v": Weight("model.layers.{}.self_attn.v_proj.weight", "dnh", "nh d"),
        "layers.o": Weight("model.layers.{}.self_attn.o_proj.weight", "nhd", "d nh"),
        "layers.mlp_norm": Weight("model.layers.{}.post_attention_layernorm.weight", "d", "d"),
        "layers.gate": Weight("model.layers.{}.mlp.gate_proj.weight", "dm", "m d"),
        "layers.up": Weight("model.layers.{}.mlp.up_proj.weight", "dm", "m d"),
        "layers.down": Weight("model.layers.{}.mlp.down_proj.weight", "md", "d m"),
        "norm": Weight("model.norm.weight", "d", "d"),
        "untied_head": Weight("lm_head.weight", "vd", "v d"),
    },
    unsupported={
        "attention_bias": bool,
        "mlp_bias": bool,
        "hidden_act": lambda name: name != "silu",
        "use_sliding_window": bool,
        "layer_types": lambda types: "sliding_attention" in types,
    },
)

QWEN3 = dataclasses.replace(
    LLAMA,
    class_name="Qwen3ForCausalLM",
    switches={"qk_norm": True, "attention_bias": False},
    weights=LLAMA.weights
    | {
        "layers.q_norm": Weight("model.layers.{}.self_attn.q_norm.weight", "h", "h"),
        "layers.k_norm": Weight("model.layers.{}.self_attn.k_norm.weight", "h", "h"),
    },
)

QWEN2 = dataclasses.replace(
    LLAMA,
    class_name="Qwen2ForCausalLM",
    switches={"qk_norm": False, "attention_bias": True},
    weights=LLAMA.weights
    | {
        "layers.q_bias": Weight("model.layers.{}.self_attn.q_proj.bias", "nh", "nh"),
        "layers.k_bias": Weight("model.layers.{}.self_attn.k_proj.bias", "nh", "nh"),
        "layers.v_bias": Weight("model.layers.{}.self_attn.v_proj.bias", "nh", "nh"),
    },
    unsupported=LLAMA.unsupported | {"attention_bias": lambda present: False},
)

ARCHITECTURES = Registry(qwen3=QWEN3, qwen2=QWEN2, llama=LLAMA)
