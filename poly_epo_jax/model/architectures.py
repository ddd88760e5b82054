"""Registry of model families, keyed by the `model_type` of Hugging Face configurations.

Each entry maps the configuration keys and weight names of the family to the names of this package, and lists the
settings that are not supported. A further family with the same network requires one entry, which a configuration file
can add:

    ARCHITECTURES["my_family"] = dataclasses.replace(LLAMA, class_name="MyFamilyForCausalLM")

A family with a different network also requires a new weight in layer_stack.py or a new switch in ModelConfig, which
layer.py implements.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.layer_settings import (
    SLIDING,
    read_by_type,
    read_experts,
    read_gemma3,
    read_linear,
    read_position_free,
    read_uniform,
    read_window,
    write_by_type,
    write_experts,
    write_gemma3,
    write_linear,
    write_position_free,
    write_uniform,
    write_window,
)
from poly_epo_jax.registry import Registry


@dataclasses.dataclass(frozen=True)
class Weight:
    """Name of a weight in Hugging Face files, and its axes in both layouts.

    For example, axes "dnh" and hf_axes "nh d" describe a weight of shape [hidden, heads, head_dim] in this package and
    [heads * head_dim, hidden] in Hugging Face files.

    Attributes:
      name: Hugging Face name. `{}` stands for the layer number, and a second `{}` for the number of the expert.
      axes: Axes in this package, one letter per axis. The axes of layers and experts are omitted.
      hf_axes: Axes in Hugging Face files, one word per axis. A word with several letters is a merged axis, and the word
        "1" an axis of size 1.
    """

    name: str
    axes: str
    hf_axes: str

    def hf_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in Hugging Face files of a weight that has `shape` in this package."""
        size = dict(zip((*self.axes, "1"), (*shape, 1), strict=True))
        return tuple(math.prod(size[letter] for letter in word) for word in self.hf_axes.split())

    def export(self, weight: Any) -> Any:
        """Converts a NumPy or JAX array to the Hugging Face layout."""
        return weight.transpose([self.axes.index(letter) for letter in self._letters]).reshape(
            self.hf_shape(weight.shape)
        )

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
        return self.hf_axes.replace(" ", "").replace("1", "")


NETWORK = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.name
    in (
        *("qk_norm", "joint_qk_norm", "attention_bias", "pre_norm", "post_norm", "norm_offset", "float32_norm"),
        *("activation", "scale_embeddings", "ropes", "windows", "query_size", "num_experts", "normalize_router"),
        *("gated_attention", "linear_layers"),
    )
}
"""ModelConfig fields in which the networks of families differ, and their defaults."""


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
      defaults: Values of ModelConfig fields whose keys are missing in config.json, as in transformers.
      read: Function of the content of config.json that returns the ModelConfig fields that follow from several keys, at
        least `ropes`. It raises ValueError if they are not supported.
      write: Function of the model configuration that returns the keys that `read` reads, and other keys whose values
        differ from those of Llama.
    """

    class_name: str
    switches: dict[str, Any]
    config_keys: dict[str, str]
    weights: dict[str, Weight]
    unsupported: dict[str, Callable[[Any], bool]]
    defaults: dict[str, Any]
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = read_uniform
    write: Callable[[ModelConfig], dict[str, Any]] = write_uniform

    def network(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the ModelConfig fields, other than sizes, that define the network.

        Args:
          written: Content of config.json.

        Raises:
          ValueError: If the settings of the layers are not supported or invalid.
        """
        return NETWORK | self.switches | self.read(written)


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
        "layer_types": lambda types: SLIDING in types,
        "partial_rotary_factor": lambda factor: factor != 1.0,
    },
    defaults={"norm_eps": 1e-6, "tie_word_embeddings": False},
)

PRE_NORMS = ("layers.attention_norm", "layers.mlp_norm")
POST_NORMS = {
    "layers.attention_post_norm": Weight("model.layers.{}.post_attention_layernorm.weight", "d", "d"),
    "layers.mlp_post_norm": Weight("model.layers.{}.post_feedforward_layernorm.weight", "d", "d"),
}

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

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    class_name="Qwen3MoeForCausalLM",
    config_keys=QWEN3.config_keys | {"mlp_size": "moe_intermediate_size", "experts_per_token": "num_experts_per_tok"},
    weights=QWEN3.weights
    | {
        "layers.router": Weight("model.layers.{}.mlp.gate.weight", "de", "e d"),
        "layers.gate": Weight("model.layers.{}.mlp.experts.{}.gate_proj.weight", "dm", "m d"),
        "layers.up": Weight("model.layers.{}.mlp.experts.{}.up_proj.weight", "dm", "m d"),
        "layers.down": Weight("model.layers.{}.mlp.experts.{}.down_proj.weight", "md", "d m"),
    },
    # All layers must have experts, because their weights are stacked.
    unsupported=QWEN3.unsupported | {"mlp_only_layers": bool, "decoder_sparse_step": lambda step: step != 1},
    read=read_experts,
    write=write_experts,
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

MISTRAL = dataclasses.replace(LLAMA, class_name="MistralForCausalLM", read=read_window, write=write_window)

SMOLLM3 = dataclasses.replace(
    LLAMA,
    class_name="SmolLM3ForCausalLM",
    unsupported={
        key: rule for key, rule in LLAMA.unsupported.items() if key not in ("use_sliding_window", "layer_types")
    },
    defaults=LLAMA.defaults | {"tie_word_embeddings": True},
    read=read_position_free,
    write=write_position_free,
)

OLMO2 = dataclasses.replace(
    LLAMA,
    class_name="Olmo2ForCausalLM",
    switches={
        "qk_norm": True,
        "joint_qk_norm": True,
        "attention_bias": False,
        "pre_norm": False,
        "post_norm": True,
        "float32_norm": True,
    },
    weights={path: weight for path, weight in LLAMA.weights.items() if path not in PRE_NORMS}
    | POST_NORMS
    | {
        "layers.q_norm": Weight("model.layers.{}.self_attn.q_norm.weight", "nh", "nh"),
        "layers.k_norm": Weight("model.layers.{}.self_attn.k_norm.weight", "nh", "nh"),
    },
    defaults=LLAMA.defaults | {"norm_eps": 1e-5},
)

OLMO3 = dataclasses.replace(
    OLMO2,
    class_name="Olmo3ForCausalLM",
    unsupported=SMOLLM3.unsupported,
    read=functools.partial(read_by_type, interval=4, theta=5e5),
    write=write_by_type,
)


GEMMA3_TEXT = dataclasses.replace(
    QWEN3,
    class_name="Gemma3ForCausalLM",
    switches=QWEN3.switches
    | {
        "post_norm": True,
        "norm_offset": 1.0,
        "float32_norm": True,
        "activation": "gelu_pytorch_tanh",
        "scale_embeddings": True,
    },
    weights=QWEN3.weights
    | POST_NORMS
    | {"layers.mlp_norm": Weight("model.layers.{}.pre_feedforward_layernorm.weight", "d", "d")},
    unsupported={
        "attention_bias": bool,
        "use_bidirectional_attention": bool,
        "attn_logit_softcapping": bool,
        "final_logit_softcapping": bool,
        "hidden_activation": lambda name: name != "gelu_pytorch_tanh",
    },
    # The folders of the 4B, 12B and 27B models omit these sizes.
    defaults={
        "vocab_size": 262_208,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "norm_eps": 1e-6,
        "max_position": 131_072,
        "tie_word_embeddings": True,
    },
    read=read_gemma3,
    write=write_gemma3,
)
LINEAR_ATTENTION = {
    "qkv": Weight("in_proj_qkv.weight", "dc", "c d"),
    "output_gate": Weight("in_proj_z.weight", "dnh", "nh d"),
    "beta": Weight("in_proj_b.weight", "dn", "n d"),
    "time_step": Weight("in_proj_a.weight", "dn", "n d"),
    "time_step_bias": Weight("dt_bias", "n", "n"),
    "log_decay_rate": Weight("A_log", "n", "n"),
    "conv": Weight("conv1d.weight", "sc", "c 1 s"),
    "value_norm": Weight("norm.weight", "h", "h"),
    "o": Weight("out_proj.weight", "nhd", "d nh"),
}
"""Weights of linear attention, by their names in this package, with their names within a layer."""

QWEN3_5_TEXT = dataclasses.replace(
    QWEN3,
    class_name="Qwen3_5ForCausalLM",
    switches=QWEN3.switches | {"gated_attention": True, "norm_offset": 1.0, "float32_norm": True},
    config_keys=QWEN3.config_keys
    | {
        "linear_key_heads": "linear_num_key_heads",
        "linear_value_heads": "linear_num_value_heads",
        "linear_key_dim": "linear_key_head_dim",
        "linear_value_dim": "linear_value_head_dim",
        "conv_size": "linear_conv_kernel_dim",
    },
    weights=QWEN3.weights
    | {
        path.replace("layers.", "linear_layers."): QWEN3.weights[path]
        for path in (*PRE_NORMS, "layers.gate", "layers.up", "layers.down")
    }
    | {
        f"linear_layers.{name}": dataclasses.replace(weight, name=f"model.layers.{{}}.linear_attn.{weight.name}")
        for name, weight in LINEAR_ATTENTION.items()
    },
    unsupported={
        "attention_bias": bool,
        "attn_output_gate": lambda present: not present,
        "hidden_act": lambda name: name != "silu",
    },
    defaults=LLAMA.defaults
    | {
        "head_dim": 256,
        "linear_key_heads": 16,
        "linear_value_heads": 32,
        "linear_key_dim": 128,
        "linear_value_dim": 128,
        "conv_size": 4,
    },
    read=read_linear,
    write=write_linear,
)

ARCHITECTURES = Registry(
    qwen3=QWEN3,
    qwen2=QWEN2,
    llama=LLAMA,
    mistral=MISTRAL,
    smollm3=SMOLLM3,
    olmo2=OLMO2,
    olmo3=OLMO3,
    gemma3_text=GEMMA3_TEXT,
    qwen3_moe=QWEN3_MOE,
    qwen3_5_text=QWEN3_5_TEXT,
)

VISION_WRAPPERS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
"""Model types of folders with a vision model and a language model, with the model type of the language model."""

MISSING_FEATURES = {
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), "an expert shared by all tokens"),
    **dict.fromkeys(("gemma3n", "gemma4"), "embeddings in each layer"),
    **{"gpt_oss": "attention sinks", "gemma2": "soft caps", "phi3": "joint projections"},
}
"""Feature that known families require and that is not implemented, by their model types."""
