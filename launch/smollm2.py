"""Writes the GGUF file of SmolLM2-135M-Instruct as a Hugging Face folder: launch/smollm2.sh calls it.

Weights are dequantised to float32, as llama.cpp and transformers do, and named and ordered as transformers has them.
The tokenizer is made of the file's tokens and merges. No torch is needed.
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
"""GGUF's names, and those of transformers' LlamaModel."""

CONTROL = 3
"""GGUF's type of tokens that no text is encoded to, such as <|im_end|>."""


def main(file: Path, folder: Path) -> None:
    reader = GGUFReader(file)
    about = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": about["llama.attention.head_count"], "attn_k": about["llama.attention.head_count_kv"]}
    weights: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        layer, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()  # pyright: ignore[reportOptionalMemberAccess]
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if kind in heads:
            weight = _rotated_by_halves(weight, heads[kind])
        weights[f"model.{f'layers.{layer}.' if layer else ''}{MODULES[kind]}.weight"] = np.ascontiguousarray(weight)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(about))
    ends = {name: about[f"tokenizer.ggml.{key}_token_id"] for name, key in _ENDS.items()}
    _write_json(folder / "generation_config.json", ends)
    _tokenizer(about).save_pretrained(folder)


_ENDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _rotated_by_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head as transformers rotates them: GGUF has rotated pairs beside each other, [.., D/2, 2, ..]."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(about: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": about["llama.vocab_size"],
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": about["llama.attention.head_count"],
        "num_key_value_heads": about["llama.attention.head_count_kv"],
        "head_dim": about["llama.rope.dimension_count"],
        "rope_theta": about["llama.rope.freq_base"],
        "rms_norm_eps": float(np.float32(about["llama.attention.layer_norm_rms_epsilon"]).astype(str)),
        "max_position_embeddings": about["llama.context_length"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **{name: about[f"tokenizer.ggml.{key}_token_id"] for name, key in _ENDS.items()},
    }


def _tokenizer(about: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that reads digits one by one: GGUF's pre-tokenizer `smollm`."""
    tokens, merges = about["tokenizer.ggml.tokens"], about["tokenizer.ggml.merges"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    made.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    control = [token for token, kind in zip(tokens, about["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {name: tokens[about[f"tokenizer.ggml.{key}_token_id"]] for name, key in _NAMED.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=about["tokenizer.chat_template"],
        model_max_length=about["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )


_NAMED = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
