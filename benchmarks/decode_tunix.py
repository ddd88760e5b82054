"""Runs decode_case.py with Tunix's Sampler. Child process of decode_peers.py."""

import sys

import decode_case
import jax.numpy as jnp
import numpy as np
from tunix.generate.sampler import CacheConfig, Sampler  # pyright: ignore[reportMissingImports]
from tunix.models.qwen3.params import create_model_from_safe_tensors  # pyright: ignore[reportMissingImports]
from tunix_model import read_config


class Ids:
    """A tokenizer for `Sampler` whose texts are token ids separated by spaces."""

    def encode(self, text: str) -> list[int]:
        """Parses token ids."""
        return [int(token) for token in text.split()]

    def decode(self, ids: list[int]) -> str:
        """Returns an empty text, because texts are not used."""
        return ""

    def bos_id(self) -> int:
        """Returns 0, because there is no start token."""
        return 0

    def eos_id(self) -> int:
        """Returns an id that is never sampled."""
        return -1

    def pad_id(self) -> int:
        """Returns the id of the padding token."""
        return 0


def main() -> None:
    """Measures all cases."""
    config = read_config(sys.argv[1])
    model = create_model_from_safe_tensors(sys.argv[1], config, dtype=jnp.float32)
    slots = decode_case.PROMPT + decode_case.MAX_TOKENS
    sampler = Sampler(model, Ids(), CacheConfig(slots, config.num_layers, config.num_kv_heads, config.head_dim))

    def decode(case: str) -> None:
        for rows, max_tokens in decode_case.batches(case):
            output = sampler(
                [" ".join(map(str, row)) for row in rows.tolist()],
                max_generation_steps=max_tokens,
                max_prompt_length=decode_case.PROMPT,
                temperature=decode_case.TEMPERATURE,
                top_p=decode_case.TOP_P[case],
                return_logprobs=True,
            )
            assert np.shape(output.tokens) == np.shape(output.logprobs) == (len(rows), max_tokens)

    for case in decode_case.TOP_P:
        decode_case.report(case, lambda case=case: decode(case), "compiled for each length, log-probabilities")


if __name__ == "__main__":
    main()
