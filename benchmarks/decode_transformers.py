"""Runs decode_case.py with transformers' generate. Child process of decode_peers.py."""

import os
import sys

import decode_case
import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, GenerationConfig


def main() -> None:
    """Measures all cases."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa")

    def decode(case: str) -> None:
        for rows, max_tokens in decode_case.batches(case):
            prompts = torch.from_numpy(rows).long()
            config = GenerationConfig(
                do_sample=True,
                temperature=decode_case.TEMPERATURE,
                top_k=0,
                top_p=decode_case.TOP_P[case],
                max_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            output = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                prompts, attention_mask=torch.ones_like(prompts), generation_config=config
            )
            tokens = output.sequences[:, decode_case.PROMPT :]
            # As in the other implementations, log-probabilities are those at the temperature, without the top-p filter.
            logprobs = torch.stack(output.logits, 1).log_softmax(-1).gather(2, tokens[..., None])
            assert logprobs.shape == (*tokens.shape, 1) and tokens.shape[1] == max_tokens

    for case in decode_case.TOP_P:
        decode_case.report(case, lambda case=case: decode(case), "dynamic cache, log-probabilities")


if __name__ == "__main__":
    main()
