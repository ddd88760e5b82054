"""Compares one policy update with transformers + torch and Tunix: python benchmarks/update_peers.py

Creates or reuses the environments of the baselines, and runs the implementations one after another, each case in a
separate process.

All implementations use the same Qwen3 with 6 million float32 weights, the batch of update_case.py, PPO's clipped
surrogate with given old log-probabilities and an entropy bonus, the mean over response tokens, gradient norm clipping,
AdamW, and the same CPU cores. The script verifies that loss, gradient norm and entropy of the first step agree.

Each implementation is used as intended by its authors, which leads to these differences: transformers pads to the
longest sequence of the batch and keeps all activations, Tunix pads to the fixed maximum, and this package packs
sequences and accumulates the gradient over microbatches. The peak resident memory of a process includes its imports and
the memory for compilation.
"""

from peers import Results, measure, show
from update_case import CASES

TOLERANCE = 1e-4  # Relative tolerance of loss, gradient norm and entropy.


def check_equal_work(results: Results) -> None:
    """Verifies that all implementations compute the same update.

    Raises:
      SystemExit: If loss, gradient norm or entropy differ.
    """
    for case, by_side in results.items():
        for name in ("loss", "gradient_norm", "entropy"):
            values = {side: line[name] for side, line in by_side.items()}
            low, high = min(values.values()), max(values.values())
            if high - low > TOLERANCE * abs(high):
                raise SystemExit(f"The implementations differ: {name} of {case} is {values}.")


if __name__ == "__main__":
    results = measure("update", [[case] for case in CASES])
    check_equal_work(results)
    columns = {"seconds": ".3f", "peak_gb": ".2f", "tokens": ",.0f", "computed_tokens": ",.0f"}
    show("update", results, columns)
