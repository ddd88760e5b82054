"""The model families by Hugging Face's model_type: how each names its settings and weights, and what is refused here.

Another family with the same network is one entry, which may be in a configuration file of your own:

    ARCHITECTURES["mistral"] = dataclasses.replace(
        LLAMA, class_name="MistralForCausalLM", refuses=LLAMA.refuses | {"sliding_window": bool}
    )

If its network differs, the difference is a further switch of ModelConfig, which qwen3.py and decoding.py read.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from poly_epo_jax.types import Registry


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight in both layouts: a letter per axis of ours (without the layers), a word per axis of Hugging Face's.

    "dnh" and "nh d" mean that ours is [embed, heads, head_dim] and theirs [heads * head_dim, embed]. In the name, {}
    stands for the number of the layer.
    """

    name: str
    ours: str
    theirs: str

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Hugging Face's shape, given ours."""
        size = dict(zip(self.ours, ours, strict=True))
        return tuple(math.prod(size[letter] for letter in word) for word in self.theirs.split())

    def export(self, ours: Any) -> Any:
        """The weight in Hugging Face's layout, as an array of the same library."""
        order = [self.ours.index(letter) for letter in self._letters]
        return ours.transpose(order).reshape(self.shape(ours.shape))

    def restore(self, theirs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The weight in our layout, of the given shape: the inverse of `export`."""
        size = dict(zip(self.ours, shape, strict=True))
        order = [self._letters.index(letter) for letter in self.ours]
        return theirs.reshape([size[letter] for letter in self._letters]).transpose(order)

    @property
    def _letters(self) -> str:
        return self.theirs.replace(" ", "")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family.

    Attributes:
      class_name: the class of its language model in transformers.
      switches: the fields of ModelConfig that distinguish its network from the others'.
      config_keys: config.json's key for each shape of ModelConfig.
      weights: by the dotted path in our parameters.
      refuses: by key of config.json, a function of its value: whether our network cannot compute what it asks for.
    """

    class_name: str
    switches: dict[str, bool]
    config_keys: dict[str, str]
    weights: dict[str, Weight]
    refuses: dict[str, Callable[[Any], bool]]


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
        "tied_head": "tie_word_embeddings",
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
    refuses={
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
    refuses=LLAMA.refuses | {"attention_bias": lambda present: False},
)

ARCHITECTURES = Registry(qwen3=QWEN3, qwen2=QWEN2, llama=LLAMA)
