"""Times decoding here, with transformers' generate, and with Tunix's Sampler: python benchmarks/decode_peers.py

It creates the peers' environments, or reuses them, and runs the sides in turn, each in its own process.

Equal: a Qwen3 of 6 million float32 weights, the requests of decode_case.py, prompts of 64 tokens, temperature 1, no
stopping, every sampled token returned with its log-probability, and the cores.

Not equal, because each side works as its users run it: the peers get every prompt repeated, 16 rows at a time, and
decode to the longest of each 16; we read a prompt once, and refill a slot as soon as it is free. Only requested tokens
are counted.
"""

from peers import measure, show

if __name__ == "__main__":
    show("decode", measure("decode", [[]]), {"seconds": ".3f", "tokens": ",.0f", "tokens_per_second": ",.0f"})
