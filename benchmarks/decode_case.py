"""Requests and timing that all implementations in decode_peers.py share. Imports no large packages."""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from update_case import VOCAB

PROMPT, MAX_TOKENS, GENERATIONS, SLOTS = 64, 128, 8, 16
TEMPERATURE = 1.0
TOP_P = {"plain": 1.0, "top_p": 0.95, "lognormal": 1.0}  # The keys are the cases.
REPEATS = {"plain": 7, "top_p": 7, "lognormal": 3}


def requests(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Creates the requests of a case.

    The case "lognormal" has 8 prompts with log-normal response lengths (mean 0.4 MAX_TOKENS, sigma 0.6). The other
    cases have 2 prompts with responses of MAX_TOKENS tokens. Tokens are never 0, which is the padding token.

    Args:
      case: A key of `TOP_P`.

    Returns:
      Prompts [P, PROMPT], each with GENERATIONS responses, and the response lengths [P * GENERATIONS] in tokens.
    """
    rng = np.random.default_rng(0)
    if case != "lognormal":
        return rng.integers(1, VOCAB, (2, PROMPT), np.int32), np.full(2 * GENERATIONS, MAX_TOKENS)
    sigma = 0.6
    lengths = rng.lognormal(np.log(0.4 * MAX_TOKENS) - sigma**2 / 2, sigma, 8 * GENERATIONS)
    return rng.integers(1, VOCAB, (8, PROMPT), np.int32), np.clip(np.rint(lengths), 1, MAX_TOKENS).astype(int)


def batches(case: str) -> Sequence[tuple[np.ndarray, int]]:
    """Groups the requests for implementations without continuous batching.

    Returns:
      Batches of SLOTS prompts in order, each with its maximum response length.
    """
    prompts, lengths = requests(case)
    rows = prompts.repeat(GENERATIONS, axis=0)
    return [(rows[i : i + SLOTS], int(lengths[i : i + SLOTS].max())) for i in range(0, len(rows), SLOTS)]


def report(case: str, decode: Callable[[], None], setting: str) -> None:
    """Measures decoding after one warm-up run, and prints a line of JSON.

    Args:
      case: A key of `TOP_P`.
      decode: Function that generates the responses to all requests of the case.
      setting: Description of the implementation's configuration.
    """
    decode()
    times = []
    for _ in range(REPEATS[case]):
        start = time.perf_counter()
        decode()
        times.append(time.perf_counter() - start)
    seconds, tokens = statistics.median(times), int(requests(case)[1].sum())
    line = {"case": case, "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
    print(json.dumps(line | {"setting": setting}), flush=True)
