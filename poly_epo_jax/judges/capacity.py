"""Estimates, before the first step, whether a judge can read and write what it will be asked to."""

import math
import sys

from poly_epo_jax.types import Judge, JudgeLoad, Limited

CHARS_PER_TOKEN = 3
"""In mathematical text: 2.98 with Qwen3's tokenizer, over 3,000 problems and over the rubric."""
TOKENS_PER_VERDICT = 50
"""In a reply, for each response: a rationale of 120 characters takes about 30, the text around it 17."""
TOKENS_PER_FRAME = 50
"""In a request, for each text: the two lines that delimit it."""


async def say_shortfalls(judge: Judge, load: JudgeLoad) -> None:
    """Warns on stderr of anything that would exceed a judge's limits."""
    if isinstance(judge, Limited):
        for shortfall in await judge.shortfalls(load):
            print(f"Warning: {shortfall}", file=sys.stderr)


def shortfalls(load: JudgeLoad, rubric: str, max_response_chars: int, max_tokens: int, context: int) -> list[str]:
    """Everything that would not fit, one sentence each; a `context` of 0 is unknown, and is taken to hold everything.

    Args:
      max_response_chars: longer responses are shortened to this many characters.
      max_tokens: the longest reply, in tokens.
      context: how many tokens the judge's prompt and reply may take together.
    """
    found, responses = [], load.num_responses
    reply = responses * TOKENS_PER_VERDICT
    if reply > max_tokens:
        found.append(
            f"The judge's reply about {responses} responses takes about {reply} tokens, more than "
            f"judge.options.max_tokens={max_tokens}; raise it, or have fewer generations of a prompt."
        )
    longest = min(load.response_tokens, math.ceil(max_response_chars / CHARS_PER_TOKEN))
    texts = load.prompt_tokens + responses * longest + (1 + responses) * TOKENS_PER_FRAME
    needed = math.ceil(len(rubric) / CHARS_PER_TOKEN) + texts + max_tokens
    if 0 < context < needed:
        found.append(
            f"{responses} responses of {longest} tokens each, the rubric and the reply take about {needed} tokens, "
            f"more than the judge's context of {context}; serve it with a longer one, or lower "
            "judge.options.max_response_chars."
        )
    return found
