"""Reads and writes the settings of config.json that concern layers: rotary position embeddings, windows and experts.

Readers map the content of config.json, in which a value may be None, to fields of ModelConfig. Writers are their
inverse, and write the keys of both transformers 4 and 5.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.rope import Rope, read_rope, write_rope

# Maximum number of layers, and of experts of a layer. Larger numbers would take minutes to process.
MAX_STACKED = 2048

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_uniform(written: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the rotary position embedding that all layers share."""
    return {"ropes": (_shared_rope(written, 1e4),)}


def write_uniform(config: ModelConfig) -> dict[str, Any]:
    """Inverse of `read_uniform`."""
    return _flat_keys(config.ropes[0])


def read_experts(written: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the experts of Qwen3-MoE, which all layers have, and the rotary position embedding.

    Raises:
      ValueError: If the number of experts is missing, smaller than `num_experts_per_tok` or above `MAX_STACKED`.
    """
    # transformers 5 writes num_local_experts.
    num_experts = written.get("num_experts") or written.get("num_local_experts")
    if type(num_experts) is not int or not written["num_experts_per_tok"] <= num_experts <= MAX_STACKED:
        raise ValueError(
            f"num_experts={num_experts!r} must be a whole number of at least "
            f"num_experts_per_tok={written['num_experts_per_tok']} and at most {MAX_STACKED}; correct it."
        )
    return read_uniform(written) | {
        "num_experts": num_experts,
        "normalize_router": bool(written.get("norm_topk_prob")),
    }


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """Inverse of `read_experts`."""
    return write_uniform(config) | {
        "num_experts": config.num_experts,
        "num_local_experts": config.num_experts,
        "norm_topk_prob": config.normalize_router,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        # Width of the MLPs of dense layers, which the model does not have. Published models have this value.
        "intermediate_size": config.mlp_size * config.experts_per_token,
    }


def read_window(written: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the rotary position embedding and the window of Mistral, which all layers share."""
    return read_uniform(written) | {"windows": (_window(written, 4096),)}


def write_window(config: ModelConfig) -> dict[str, Any]:
    """Inverse of `read_window`."""
    return write_uniform(config) | {"sliding_window": config.windows[0] or None}


def read_position_free(written: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the layers of SmolLM3, of which some have no positions, and by a setting some a window."""
    num_layers, interval = _number(written, "num_hidden_layers"), _number(written, "no_rope_layer_interval", 4)
    has_rope = written.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    has_rope = _checked(has_rope, "no_rope_layers", num_layers, (0, 1))
    window = _window(written, 0) if written.get("use_sliding_window") else 0
    types = written.get("layer_types") or [FULL if rotated else SLIDING for rotated in has_rope]
    rope = _shared_rope(written, 2e6)
    ropes = [rope if rotated else Rope(0.0) for rotated in has_rope]
    windows = [window if kind == SLIDING else 0 for kind in _checked(types, "layer_types", num_layers)]
    return {"ropes": _compact(ropes), "windows": _compact(windows)}


def write_position_free(config: ModelConfig) -> dict[str, Any]:
    """Inverse of `read_position_free`."""
    ropes, windows = config.layer_ropes, config.layer_windows
    return _flat_keys(next((rope for rope in ropes if rope.theta), ropes[0])) | {
        "no_rope_layers": [int(rope.theta > 0) for rope in ropes],
        "layer_types": [SLIDING if window else FULL for window in windows],
        "use_sliding_window": any(windows),
        "sliding_window": max(windows) or None,
    }


def read_by_type(
    written: Mapping[str, Any], *, interval: int, theta: float, sliding_theta: float | None = None
) -> dict[str, Any]:
    """Reads layers with and without a window, each type with its own rotary position embedding, as in Gemma 3.

    Args:
      written: Content of config.json.
      interval: Every how many layers one layer has no window, if config.json does not contain the type of each layer.
      theta: Base of the frequencies of layers without a window, if config.json does not contain it.
      sliding_theta: Base of the frequencies of layers with a window. If None, equal to the base of the other layers.
    """
    num_layers = _number(written, "num_hidden_layers")
    interval = _number(written, "sliding_window_pattern", _number(written, "_sliding_window_pattern", interval))
    types = written.get("layer_types") or _types_at_interval(num_layers, interval, SLIDING)
    by_type, max_position = written.get("rope_parameters") or {}, _number(written, "max_position_embeddings", 131_072)
    if by_type and not any(kind in by_type for kind in (FULL, SLIDING)):
        raise ValueError(f"rope_parameters {by_type!r} is not supported; nest it under {FULL!r} and {SLIDING!r}.")
    full = {"rope_theta": written.get("rope_theta") or theta} | (written.get("rope_scaling") or {})
    sliding = {"rope_theta": written.get("rope_local_base_freq") or sliding_theta or full["rope_theta"]}
    ropes = {
        kind: read_rope("rope_parameters", parameters | (by_type.get(kind) or {}), max_position)
        for kind, parameters in ((FULL, full), (SLIDING, sliding))
    }
    types, window = _checked(types, "layer_types", num_layers), _window(written, 4096)
    return {
        "ropes": _compact([ropes[kind] for kind in types]),
        "windows": _compact([window if kind == SLIDING else 0 for kind in types]),
    }


def write_by_type(config: ModelConfig) -> dict[str, Any]:
    """Inverse of `read_by_type`."""
    ropes, windows = config.layer_ropes, config.layer_windows
    types = [SLIDING if window else FULL for window in windows]
    by_type = dict(zip(types, ropes, strict=True))
    full = by_type.get(FULL, ropes[0])
    return _flat_keys(full) | {
        "rope_parameters": {kind: write_rope(by_type.get(kind, full)) for kind in (FULL, SLIDING)},
        "layer_types": types,
        "sliding_window": max(windows) or None,
    }


def read_gemma3(written: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the layers and the scale of the attention scores of Gemma 3."""
    by_type = read_by_type(written, interval=6, theta=1e6, sliding_theta=1e4)
    return by_type | {"query_size": _number(written, "query_pre_attn_scalar", 256)}


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    """Inverse of `read_gemma3`. Also writes the name of the activation, whose key differs from Llama's."""
    keys = write_by_type(config)
    return keys | {
        "rope_local_base_freq": keys["rope_parameters"][SLIDING]["rope_theta"],
        "query_pre_attn_scalar": config.query_size,
        "hidden_act": None,
        "hidden_activation": config.activation,
    }


def read_linear(written: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the layers of Qwen3.5, of which some have linear attention, and the fraction of each head that is rotated.

    The positions of text are equal in all sections of the rotated elements, so `mrope_section` has no effect.

    Raises:
      ValueError: If the fraction is invalid, or if the numbers of heads of linear attention do not match.
    """
    num_layers, interval = _number(written, "num_hidden_layers"), _number(written, "full_attention_interval", 4)
    types = written.get("layer_types") or _types_at_interval(num_layers, interval, LINEAR)
    rope = dict(written.get("rope_parameters") or written.get("rope_scaling") or {})
    for key in ("mrope_section", "mrope_interleaved"):
        rope.pop(key, None)
    key = "partial_rotary_factor"
    fraction = rope.pop(key, None) or written.get(key) or 0.25
    if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"{key}={fraction!r} must be a number greater than 0 and at most 1; correct it.")
    heads = [_number(written, f"linear_num_{kind}_heads", count) for kind, count in (("key", 16), ("value", 32))]
    if heads[1] % heads[0]:
        raise ValueError(f"linear_num_key_heads={heads[0]} must divide linear_num_value_heads={heads[1]}; correct it.")
    shared = _shared_rope({**written, "rope_scaling": None, "rope_parameters": rope}, 1e4)
    return {
        "ropes": (dataclasses.replace(shared, fraction=fraction),),
        "linear_layers": _compact(
            [kind == LINEAR for kind in _checked(types, "layer_types", num_layers, (FULL, LINEAR))]
        ),
    }


def write_linear(config: ModelConfig) -> dict[str, Any]:
    """Inverse of `read_linear`."""
    keys, rope, types = write_uniform(config), config.ropes[0], _linear_types(config)
    interval = full_attention_interval(config)
    rotated = int(config.head_dim * rope.fraction) // 2
    # Servers expect the sections of images, whose sizes have no effect on text.
    sections = {"mrope_section": [len(range(i, rotated, 3)) for i in range(3)], "mrope_interleaved": True}
    return keys | {
        "rope_parameters": keys["rope_parameters"] | sections,
        "partial_rotary_factor": rope.fraction,
        "layer_types": types,
        # SGLang reads this key in place of layer_types.
        **({} if interval is None else {"full_attention_interval": interval}),
        "attn_output_gate": config.gated_attention,
    }


def full_attention_interval(config: ModelConfig) -> int | None:
    """Returns the number N for which exactly every N-th layer has full attention. Returns None if there is none."""
    types = _linear_types(config)
    interval = types.index(FULL) + 1 if FULL in types else 0
    return interval if interval and types == _types_at_interval(len(types), interval, LINEAR) else None


def _linear_types(config: ModelConfig) -> list[str]:
    return [LINEAR if name == "linear_layers" else FULL for name, _ in config.places]


def _types_at_interval(num_layers: int, interval: int, others: str) -> list[str]:
    return [FULL if (layer + 1) % interval == 0 else others for layer in range(num_layers)]


def _shared_rope(written: Mapping[str, Any], theta: float) -> Rope:
    parameters = {"rope_theta": written["rope_theta"] if written.get("rope_theta") is not None else theta}
    parameters |= (written.get("rope_scaling") or {}) | (written.get("rope_parameters") or {})
    key = "rope_scaling" if written.get("rope_scaling") else "rope_parameters"
    return read_rope(key, parameters, _number(written, "max_position_embeddings", 2048))


def _flat_keys(rope: Rope) -> dict[str, Any]:
    """Returns the keys of transformers 5, and of transformers 4 and servers that use it."""
    parameters = write_rope(rope)
    scaling = {} if rope.scaling is None else {"rope_scaling": parameters}
    return {"rope_parameters": parameters, "rope_theta": rope.theta, **scaling}


def _window(written: Mapping[str, Any], default: int) -> int:
    """Returns the window of the layers that have one. None disables the window, and a missing key is the default."""
    window = written.get("sliding_window", default)
    return _number({"sliding_window": window}, "sliding_window") if window else 0


def _number(written: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if written.get(key) is None else written[key]
    if not isinstance(value, int | float) or value < 1 or value % 1:  # inf % 1 is NaN.
        raise ValueError(f"{key}={value!r} must be a whole number greater than 0; correct it.")
    return int(value)


def _checked(values: Any, key: str, num_layers: int, allowed: Sequence[Any] = (FULL, SLIDING)) -> list[Any]:
    """Returns the values of the layers. A list may be longer than the model, as in transformers."""
    if not isinstance(values, list) or len(values) < num_layers or any(value not in allowed for value in values):
        raise ValueError(f"{key}={values!r} must contain {num_layers} values of {list(allowed)}; correct it.")
    return values[:num_layers]


def _compact(values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns one value if all are equal, so that equal models have equal configurations."""
    return tuple(values[:1]) if len(set(values)) == 1 else tuple(values)
