"""Writes the model of the comparisons, with random weights, as a Hugging Face folder: peers_model.py FOLDER"""

import sys

from flax import nnx
from update_case import VOCAB

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf import save_pretrained
from poly_epo_jax.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=256, mlp_size=1024, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64
)

if __name__ == "__main__":
    params = nnx.to_pure_dict(nnx.split(Transformer(CONFIG, nnx.Rngs(0)))[1])
    save_pretrained(sys.argv[1], params, CONFIG, dtype="float32")
