"""Runs decode_case.py with the embedded sampler, which refills slots. Child process of decode_peers.py."""

import functools
import sys

import decode_case
import jax
import numpy as np

from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.hf import load_params, read_model_config
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts.embedded.slots import Job, Slots
from poly_epo_jax.types import Sampling


def main() -> None:
    """Measures all cases."""
    config = read_model_config(sys.argv[1], dtype="float32")
    weights = jax.jit(functools.partial(decoding_weights, config))(load_params(sys.argv[1], config))

    def decode(case: str) -> None:
        prompts, lengths = decode_case.requests(case)
        requests = [Job(i // decode_case.GENERATIONS, i, length) for i, length in enumerate(lengths.tolist())]
        slots = Slots(
            config,
            weights,
            make_mesh(1, 1, 1),
            np.zeros(0, np.int32),  # Decoding continues without stop tokens.
            list(prompts),
            requests,
            Sampling(decode_case.MAX_TOKENS, decode_case.TEMPERATURE, decode_case.TOP_P[case]),
            num_slots=decode_case.SLOTS,
            max_prompts=decode_case.SLOTS // decode_case.GENERATIONS,
            max_length=decode_case.PROMPT + decode_case.MAX_TOKENS,
        )
        finished = []
        while not slots.is_done:
            finished += slots.advance()
        assert [len(one.token_ids) for one in sorted(finished)] == lengths.tolist()

    for case in decode_case.TOP_P:
        decode_case.report(case, functools.partial(decode, case), f"{decode_case.SLOTS} slots, log-probabilities")


if __name__ == "__main__":
    main()
