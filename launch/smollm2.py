"""Converts the GGUF file of SmolLM2-135M-Instruct to a Hugging Face folder. Called by launch/smollm2.sh.

Weights are dequantized to float32, as in llama.cpp and transformers, and have the names and layouts of transformers.
The tokenizer is built from the tokens and merges in the file. torch is not required.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Module names in GGUF, and in LlamaModel of transformers."""

CONTROL = 3
"""GGUF type of control tokens, such as <|im_end|>. Text is never encoded to control tokens."""


def main(file: Path, folder: Path) -> None:
    """Converts a GGUF file.

    Args:
      file: The GGUF file.
      folder: The Hugging Face folder to create. It must not exist.

    Raises:
      FileExistsError: If `folder` exists.
    """
    reader = GGUFReader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    weights: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        layer, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()  # pyright: ignore[reportOptionalMemberAccess]
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if kind in heads:
            weight = _rotated_by_halves(weight, heads[kind])
        weights[f"model.{f'layers.{layer}.' if layer else ''}{MODULES[kind]}.weight"] = np.ascontiguousarray(weight)
    folder.mkdir(parents=True)
    file = folder / "model.safetensors"
    file.touch()
    mode = file.stat().st_mode
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors 0.8 creates files that only their owner can read
    _write_json(folder / "config.json", _config(metadata))
    ends = {name: metadata[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL_TOKEN_IDS.items()}
    _write_json(folder / "generation_config.json", ends)
    _tokenizer(metadata).save_pretrained(folder)


_SPECIAL_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _rotated_by_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of each head from rotary pairs that are adjacent (GGUF) to pairs D/2 rows apart (transformers).

    Args:
      weight: Query or key projection [num_heads * D, hidden size].
      num_heads: Number of query or key heads.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "rms_norm_eps": float(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]).astype(str)),
        "max_position_embeddings": metadata["llama.context_length"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **{name: metadata[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL_TOKEN_IDS.items()},
    }


def _tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Builds a byte-level BPE tokenizer that splits numbers into digits, as the GGUF pre-tokenizer `smollm` does."""
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    control = [
        token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in _SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )


_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
