"""Estimates the tokens of a judge's request and reply, and compares them with the limits of the judge."""

import math
import sys

from poly_epo_jax.types import CapacityChecked, Judge, JudgeLoad

CHARS_PER_TOKEN = 3
"""Characters per token of mathematical text. Qwen3's tokenizer has 2.98 on 3,000 problems and on the rubric."""
TOKENS_PER_VERDICT = 50
"""Tokens of a reply per response: about 30 for a rationale of 120 characters, and 17 for the JSON around it."""
TOKENS_PER_FREE_VERDICT = 512
"""Tokens of a reply per response without a JSON schema, which limits the length of a rationale.

In an independent replication of the paper with 8 responses, 2,048 tokens truncated 78% of the replies, and 4,096
tokens were sufficient.
"""
TOKENS_PER_FRAME = 50
"""Tokens of the two delimiter lines of each text in a request."""
TOKENS_PER_LABEL = 25
"""Tokens of the line before each turn of an episode."""


async def warn_capacity(judge: Judge, load: JudgeLoad) -> None:
    """Prints a warning to stderr for each limit of the judge that a request of this size would exceed.

    Args:
      judge: The judge. Judges without limits never cause warnings.
      load: Size of the largest request.
    """
    if isinstance(judge, CapacityChecked):
        for shortfall in await judge.capacity_warnings(load):
            print(f"Warning: {shortfall}", file=sys.stderr)


def capacity_warnings(
    load: JudgeLoad,
    rubric: str,
    max_response_chars: int,
    max_tokens: int,
    context: int,
    tokens_per_verdict: int = TOKENS_PER_VERDICT,
    section: str = "judge",
) -> list[str]:
    """Estimates the size of a request and its reply, and compares them with the limits of the judge.

    Args:
      load: Size of the request.
      rubric: Text of the system message.
      max_response_chars: Maximum number of characters per response. Longer responses are shortened.
      max_tokens: Maximum number of tokens of a reply.
      context: Maximum number of tokens of prompt and reply. 0 means unknown; the prompt is then not checked.
      tokens_per_verdict: Number of tokens of a reply per response.
      section: Dotted name of the section of the judge.

    Returns:
      One sentence per exceeded limit.
    """
    found, responses = [], load.num_responses
    reply = responses * tokens_per_verdict
    if reply > max_tokens:
        schema = (
            f", set {section}.options.response_format=json_schema" if tokens_per_verdict > TOKENS_PER_VERDICT else ""
        )
        found.append(
            f"The judge's reply for {responses} responses takes about {reply} tokens, which exceeds "
            f"{section}.options.max_tokens={max_tokens}; raise it{schema}, or lower the number of generations per "
            "prompt."
        )
    labels = TOKENS_PER_LABEL * (2 * load.num_turns - 1) if load.num_turns > 1 else 0
    longest = min(load.response_tokens + labels, math.ceil(max_response_chars / CHARS_PER_TOKEN))
    texts = load.prompt_tokens + responses * longest + (1 + responses) * TOKENS_PER_FRAME
    needed = math.ceil(len(rubric) / CHARS_PER_TOKEN) + texts + max_tokens
    if 0 < context < needed:
        found.append(
            f"{responses} responses of {longest} tokens each, the rubric and the reply take about {needed} tokens, "
            f"which exceeds the judge's context of {context}; raise the context length of the server, or lower "
            f"{section}.options.max_response_chars."
        )
    return found
