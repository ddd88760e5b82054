"""The task of every side of decode_peers.py: the requests, and how decoding is timed. Imports nothing heavy."""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from update_case import VOCAB

PROMPT, MAX_TOKENS, GENERATIONS, SLOTS = 64, 128, 8, 16
TEMPERATURE = 1.0
TOP_P = {"plain": 1.0, "top_p": 0.95, "lognormal": 1.0}  # the cases
REPEATS = {"plain": 7, "top_p": 7, "lognormal": 3}


def requests(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [P, PROMPT], of which each is to be answered GENERATIONS times, and how many tokens [P * GENERATIONS].

    MAX_TOKENS for each of 2 prompts; but for "lognormal" of 8 prompts: mean 0.4 MAX_TOKENS, sigma 0.6. Tokens are
    never 0, which pads.
    """
    rng = np.random.default_rng(0)
    if case != "lognormal":
        return rng.integers(1, VOCAB, (2, PROMPT), np.int32), np.full(2 * GENERATIONS, MAX_TOKENS)
    sigma = 0.6
    lengths = rng.lognormal(np.log(0.4 * MAX_TOKENS) - sigma**2 / 2, sigma, 8 * GENERATIONS)
    return rng.integers(1, VOCAB, (8, PROMPT), np.int32), np.clip(np.rint(lengths), 1, MAX_TOKENS).astype(int)


def batches(case: str) -> Sequence[tuple[np.ndarray, int]]:
    """The requests for a side without continuous batching: SLOTS prompts at a time, in order, and their longest."""
    prompts, lengths = requests(case)
    rows = prompts.repeat(GENERATIONS, axis=0)
    return [(rows[i : i + SLOTS], int(lengths[i : i + SLOTS].max())) for i in range(0, len(rows), SLOTS)]


def report(case: str, decode: Callable[[], None], setting: str) -> None:
    """Times `decode`, which answers all of the case's requests, after one warm-up, and prints a line of JSON."""
    decode()
    times = []
    for _ in range(REPEATS[case]):
        start = time.perf_counter()
        decode()
        times.append(time.perf_counter() - start)
    seconds, tokens = statistics.median(times), int(requests(case)[1].sum())
    line = {"case": case, "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
    print(json.dumps(line | {"setting": setting}), flush=True)
