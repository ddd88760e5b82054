"""Tiny models of all families, whose stored references `make_references.py` computes with transformers on torch.

This module does not require torch: weights are drawn with NumPy by the names and shapes of their tensors, which the
references contain.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

REFERENCES = Path(__file__).parent / "references"

SHAPES: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW, ORIGINAL_LENGTH = 9, 16
TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def by_type(full: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": WINDOW,
        "layer_types": TYPES,
        "rope_parameters": {"full_attention": full, "sliding_attention": DEFAULT},
    }


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {"rope_parameters": DEFAULT, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "qwen3_yarn": (
        "Qwen3",
        # With these numbers of periods, neither bound of the interpolation is at an end of the frequencies.
        {"rope_parameters": YARN | {"beta_fast": 2.0, "beta_slow": 0.1, "truncate": False}, "head_dim": 12},
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 12}),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": TYPES},
    ),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 12}),
    "qwen3_moe_raw": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", by_type(YARN | {"attention_factor": 1.3})),
    "gemma3": (
        "Gemma3",
        by_type({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6})
        | {"head_dim": 12, "query_pre_attn_scalar": 20},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "head_dim": 12,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 3,
            # The norm of outputs close to 0 would amplify rounding errors a thousandfold.
            "rms_norm_eps": 1e-2,
        },
    ),
}
"""Name of the family's classes in transformers, and settings of a small model, by case."""

WITH_OFFSET = ("gemma3", "qwen3_5")
"""Cases whose norms multiply by 1 + weight, except for the norm of linear attention."""

SEEDS = {"qwen3_moe_raw": 2}
"""Seeds of the weights other than 0. With seed 0, rounding to bfloat16 moves several tokens to other experts, whose
errors dominate the mean error that test_families.py compares. With seed 1, one expert has no tokens."""

LENGTHS, PADDING = (37, 21, 5), 1
"""Lengths of the sequences, of which the longest one exceeds the windows and the original lengths, and the number of
padding tokens after them in a packed row."""


class Reference(NamedTuple):
    """Results of transformers for one case.

    Attributes:
      shapes: Shape of each tensor of the model folder, in alphabetical order of the names.
      logits: Logits of the sequences, one after the other, float32 [tokens, vocab_size].
      gradients: `summarize` of the gradient of sum(sin(logits)) with respect to each tensor, float32 [tensors, 5].
    """

    shapes: dict[str, tuple[int, ...]]
    logits: np.ndarray
    gradients: np.ndarray


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, SHAPES["vocab_size"], length) for length in LENGTHS]


def packed_row() -> tuple[np.ndarray, ...]:
    """Returns the tokens, positions and segment ids of a row with the sequences as segments 1, 2, 3, and padding."""
    positions = np.concatenate([np.arange(length) for length in (*LENGTHS, PADDING)])
    segment_ids = np.repeat((1, 2, 3, 0), (*LENGTHS, PADDING))
    tokens = np.pad(np.concatenate(sequences()), (0, PADDING))
    return tuple(x.astype(np.int32)[None] for x in (tokens, positions, segment_ids))


def make_config(case: str) -> transformers.PretrainedConfig:
    name, settings = FAMILIES[case]
    config_class = f"{name}TextConfig" if name in ("Gemma3", "Qwen3_5") else f"{name}Config"
    return getattr(transformers, config_class)(**SHAPES, **settings)


def write_model(folder: Path, case: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Writes config.json and random weights, which only depend on the case and the names and shapes of the tensors."""
    config, rng, tensors = make_config(case), np.random.default_rng(SEEDS.get(case, 0)), {}
    config.architectures = [f"{FAMILIES[case][0]}ForCausalLM"]
    config.save_pretrained(folder)
    for name in sorted(shapes):
        noise, shape = rng.standard_normal(shapes[name], np.float32), shapes[name]
        is_scale = "norm" in name and (case not in WITH_OFFSET or "linear_attn" in name)
        tensor = is_scale + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
        tensors[name] = tensor.astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def summarize(gradients: Mapping[str, Any]) -> np.ndarray:
    """Computes the largest magnitude of each tensor, and its products with four random tensors.

    Args:
      gradients: Tensors by name.

    Returns:
      An array [tensors, 5], in alphabetical order of the names.
    """
    rng = np.random.default_rng(1)

    def summaries() -> Iterator[list[float]]:
        for name in sorted(gradients):
            gradient = np.asarray(gradients[name], np.float64).ravel()
            yield [np.abs(gradient).max(), *(rng.standard_normal((4, gradient.size)) @ gradient)]

    return np.array(list(summaries()), np.float32)


def assert_same_gradients(found: np.ndarray, expected: np.ndarray, shapes: Mapping[str, Any]) -> None:
    """Compares the summaries of gradients. The tolerance is relative to the largest element of each gradient."""
    assert found.shape == expected.shape
    errors = np.abs(found - expected).max(axis=1) / expected[:, 0]
    assert {name: error for name, error in zip(sorted(shapes), errors, strict=True) if not error <= 1e-4} == {}


def store(reference: Reference, case: str, folder: Path = REFERENCES) -> None:
    arrays = {"logits": reference.logits, "gradients": reference.gradients}
    shapes = {name: " ".join(map(str, shape)) for name, shape in reference.shapes.items()}
    save_file(arrays, folder / f"{case}.safetensors", shapes)


def read_reference(case: str, folder: Path = REFERENCES) -> Reference:
    with safe_open(folder / f"{case}.safetensors", "numpy") as file:
        shapes = {name: tuple(map(int, shape.split())) for name, shape in sorted(file.metadata().items())}
        return Reference(shapes, file.get_tensor("logits"), file.get_tensor("gradients"))
