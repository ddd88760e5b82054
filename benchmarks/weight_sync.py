"""Measures writing weights to a folder that servers read: python benchmarks/weight_sync.py [FOLDER ...]

Writes 150 million random Qwen3 weights as bfloat16 (300 MB) to each folder, alternating between one writer thread and
the number of writer threads of `model.hf_files`. Prints the median seconds of both and their ratio.
"""

import shutil
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from poly_epo_jax.model import hf, hf_files
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=65_536, hidden_size=768, mlp_size=2304, num_layers=14, num_heads=12, num_kv_heads=6, head_dim=64
)
ROUNDS = 5


def main() -> None:
    """Measures each folder and prints the results."""
    params = nnx.to_pure_dict(nnx.split(nnx.jit(lambda: Transformer(CONFIG, nnx.Rngs(0)))())[1])
    size = 2 * sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{size / 1e6:.0f} MB, {jax.default_backend()}")
    for folder in map(Path, sys.argv[1:] or ["/dev/shm", "."]):
        seconds: dict[int, list[float]] = {1: [], hf_files.WRITERS: []}
        for _ in range(ROUNDS + 1):
            for writers, taken in seconds.items():
                hf_files.WRITERS = writers
                taken.append(_write(folder.absolute() / "weight-sync-bench", params))
        one, several = (statistics.median(taken[1:]) for taken in seconds.values())  # The first round compiles.
        print(
            f"{folder}: one writer {one:.2f} s, {list(seconds)[1]} writers {several:.2f} s, ratio {one / several:.2f}"
        )


def _write(folder: Path, params: dict) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    hf.save_pretrained(folder, jax.tree.map(jnp.asarray, params), CONFIG)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds


if __name__ == "__main__":
    main()
