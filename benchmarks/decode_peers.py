"""Compares decoding with transformers' generate and Tunix's Sampler: python benchmarks/decode_peers.py

Creates or reuses the environments of the baselines, and runs the implementations one after another, each in a separate
process.

All implementations use the same Qwen3 with 6 million float32 weights, the requests of decode_case.py with prompts of 64
tokens, temperature 1, no stop tokens, and the same CPU cores. They return each sampled token with its log-probability.

Each implementation is used as intended by its authors, which leads to these differences: the baselines process 16
repeated prompts at a time and decode until the longest response of each batch is complete. The embedded sampler reads a
prompt once, and refills a slot as soon as it is free. Only requested tokens are counted.
"""

from peers import measure, show

if __name__ == "__main__":
    show("decode", measure("decode", [[]]), {"seconds": ".3f", "tokens": ",.0f", "tokens_per_second": ",.0f"})
