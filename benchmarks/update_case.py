"""Batch and timing that all implementations in update_peers.py share. Imports no large packages."""

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
    """The sequences of one update.

    All response tokens have the same weight in the loss, 1 / `response_tokens`. Tokens are never 0, which is the
    padding token.

    Attributes:
      prompts: Token ids [SEQUENCES, PROMPT].
      responses: Token ids of each response.
      old_logprobs: Log-probabilities of the response tokens under the old policy.
      advantages: Advantages [SEQUENCES].
    """

    prompts: np.ndarray
    responses: list[np.ndarray]
    old_logprobs: list[np.ndarray]
    advantages: np.ndarray

    @property
    def response_tokens(self) -> int:
        """Number of tokens of all responses."""
        return sum(map(len, self.responses))

    def padded(self, length: int) -> dict[str, np.ndarray]:
        """Returns `responses`, `old_logprobs` and `mask` [SEQUENCES, length] by name, padded on the right."""

        def pad(rows: list[np.ndarray]) -> np.ndarray:
            return np.stack([np.pad(row, (0, length - len(row))) for row in rows])

        mask = pad([np.ones(len(row), bool) for row in self.responses])
        return {"responses": pad(self.responses), "old_logprobs": pad(self.old_logprobs), "mask": mask}


def random_batch(case: str) -> Batch:
    """Creates a random batch.

    Args:
      case: "full" for responses of MAX_RESPONSE tokens, or "lognormal" for log-normal response lengths (mean
        0.4 MAX_RESPONSE, sigma 0.6).
    """
    rng = np.random.default_rng(0)
    sigma = 0.6
    lengths = rng.lognormal(np.log(0.4 * MAX_RESPONSE) - sigma**2 / 2, sigma, SEQUENCES)
    lengths = np.clip(np.rint(lengths), 1, MAX_RESPONSE).astype(int)
    if case == "full":
        lengths[:] = MAX_RESPONSE
    return Batch(
        prompts=rng.integers(1, VOCAB, (SEQUENCES, PROMPT), np.int32),
        responses=[rng.integers(1, VOCAB, length, np.int32) for length in lengths],
        # Close to the log-probabilities of random weights, so that some of the ratios are clipped.
        old_logprobs=[rng.normal(-np.log(VOCAB) - 0.5, 0.1, length).astype(np.float32) for length in lengths],
        advantages=rng.normal(size=SEQUENCES).astype(np.float32),
    )


def model_and_case() -> tuple[str, str]:
    """Returns the arguments of a child process: the folder of the model, and the case.

    Raises:
      SystemExit: If the case is not one of `CASES`.
    """
    folder, case = sys.argv[1:]
    if case not in CASES:
        raise SystemExit(f"The case {case!r} is unknown; choose one of {', '.join(CASES)}.")
    return folder, case


def report(case: str, batch: Batch, step: Callable[[], dict[str, Any]], computed_tokens: int, setting: str) -> None:
    """Measures an update and prints the results as a line of JSON.

    Args:
      case: One of `CASES`.
      batch: Batch of the update.
      step: Runs one update and returns its `loss`, `gradient_norm` and `entropy`. The values of the first update, which
        starts from the weights in the model's folder, are part of the results.
      computed_tokens: Number of tokens that are processed, including padding.
      setting: Description of the implementation's configuration.
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
