"""The task of every side of update_peers.py: shapes, a random batch, how a step is timed. Imports nothing heavy."""

import dataclasses
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

VOCAB = 8192
SEQUENCES, PROMPT, MAX_RESPONSE = 8, 128, 384
CLIP_LOW, CLIP_HIGH, ENTROPY_COEF = 0.2, 0.28, 0.01
LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-6, 0.9, 0.999, 1e-8, 0.01, 1.0
WARM_UPS, STEPS = 2, 7
CASES = ("full", "lognormal")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens are never 0, which pads. Every response token weighs the same in the loss, one over their number."""

    prompts: np.ndarray  # [SEQUENCES, PROMPT]
    responses: list[np.ndarray]
    old_logprobs: list[np.ndarray]
    advantages: np.ndarray  # [SEQUENCES]

    @property
    def response_tokens(self) -> int:
        return sum(map(len, self.responses))

    def padded(self, length: int) -> dict[str, np.ndarray]:
        """`responses`, `old_logprobs` and `mask`, each [SEQUENCES, length], padded on the right."""

        def pad(rows: list[np.ndarray]) -> np.ndarray:
            return np.stack([np.pad(row, (0, length - len(row))) for row in rows])

        mask = pad([np.ones(len(row), bool) for row in self.responses])
        return {"responses": pad(self.responses), "old_logprobs": pad(self.old_logprobs), "mask": mask}


def random_batch(case: str) -> Batch:
    """Responses of MAX_RESPONSE tokens, or of log-normal length: mean 0.4 MAX_RESPONSE, sigma 0.6."""
    rng = np.random.default_rng(0)
    sigma = 0.6
    lengths = rng.lognormal(np.log(0.4 * MAX_RESPONSE) - sigma**2 / 2, sigma, SEQUENCES)
    lengths = np.clip(np.rint(lengths), 1, MAX_RESPONSE).astype(int)
    if case == "full":
        lengths[:] = MAX_RESPONSE
    return Batch(
        prompts=rng.integers(1, VOCAB, (SEQUENCES, PROMPT), np.int32),
        responses=[rng.integers(1, VOCAB, length, np.int32) for length in lengths],
        # About what random weights give, so that some ratios are clipped.
        old_logprobs=[rng.normal(-np.log(VOCAB) - 0.5, 0.1, length).astype(np.float32) for length in lengths],
        advantages=rng.normal(size=SEQUENCES).astype(np.float32),
    )


def model_and_case() -> tuple[str, str]:
    """A child's arguments: the model's folder, and one of CASES."""
    folder, case = sys.argv[1:]
    if case not in CASES:
        raise SystemExit(f"The case is {case!r}, but must be one of {', '.join(CASES)}.")
    return folder, case


def report(case: str, batch: Batch, step: Callable[[], dict[str, Any]], computed_tokens: int, setting: str) -> None:
    """Runs `step`, an update that returns its `loss`, `gradient_norm` and `entropy`, and prints a line of JSON.

    Those three are the first step's, of the weights in the model's folder.
    """

    def finished_step() -> dict[str, float]:
        return {name: float(value) for name, value in step().items()}

    first = finished_step()
    for _ in range(WARM_UPS - 1):
        finished_step()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        finished_step()
        times.append(time.perf_counter() - start)
    line = {
        "case": case,
        "seconds": statistics.median(times),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "tokens": batch.prompts.size + batch.response_tokens,
        "computed_tokens": computed_tokens,
        "setting": setting,
    }
    print(json.dumps(line | first))
