"""Times one policy update here, in transformers with torch, and in Tunix: python benchmarks/update_peers.py

It creates the peers' environments, or reuses them, and runs the three in turn, each case in its own process.

Equal: a Qwen3 of 6 million float32 weights, the batch of update_case.py, PPO's clipped surrogate with given old
log-probabilities and an entropy bonus, the mean over response tokens, gradient norm and its clipping, AdamW, and the
cores. It checks that all compute the same: loss, gradient norm and entropy of the first step must agree.

Not equal, because each side works as its users run it: transformers pads to the batch's longest sequence and keeps all
activations; Tunix pads to the fixed maximum; we pack, and accumulate the gradient over microbatches. A process's peak
resident memory includes its imports and the memory for compiling.
"""

from peers import Results, measure, show
from update_case import CASES

TOLERANCE = 1e-4  # relative tolerance of the numbers that must agree


def check_equal_work(results: Results) -> None:
    for case, by_side in results.items():
        for name in ("loss", "gradient_norm", "entropy"):
            values = {side: line[name] for side, line in by_side.items()}
            low, high = min(values.values()), max(values.values())
            if high - low > TOLERANCE * abs(high):
                raise SystemExit(f"The sides do not compute the same: {name} of {case} is {values}.")


if __name__ == "__main__":
    results = measure("update", [[case] for case in CASES])
    check_equal_work(results)
    columns = {"seconds": ".3f", "peak_gb": ".2f", "tokens": ",.0f", "computed_tokens": ",.0f"}
    show("update", results, columns)
