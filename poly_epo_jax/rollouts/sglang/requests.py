"""SGLang's /generate: how generations are asked for, and how its answers, and those of sglang-jax, are read."""

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.http_client import ServerError
from poly_epo_jax.types import Request, Sampling


def request_body(
    request: Request, indices: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]
) -> dict[str, Any]:
    """Asks for a generation for each of these seeds of a request: several as a list, which routers do not take."""
    parameters = {
        "max_new_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(stop_ids),
    }
    prompt_ids: list = request.prompt_ids.tolist()
    each = [parameters | {"sampling_seed": int(request.seeds[i]) >> 1} for i in indices]  # its seeds are signed
    is_list = len(indices) > 1
    return {
        "input_ids": [prompt_ids] * len(indices) if is_list else prompt_ids,
        "sampling_params": each if is_list else each[0],
        "return_logprob": True,
    }


async def ask(client: httpx.AsyncClient, url: str, problem_id: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The server's answers, one for each generation.

    Raises:
      ServerError: the server refuses the request, as it would again.
      httpx.HTTPError: it does not answer, or is in trouble of its own.
    """
    response = await client.post(f"{url}/generate", json=body)
    if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
        raise ServerError(f"{url} refuses the prompt of problem {problem_id}: {response.text.strip()[:500]}")
    answer = response.raise_for_status().json()
    return answer if isinstance(answer, list) else [answer]


def is_whole(answer: dict[str, Any]) -> bool:
    """Whether the generation ended by itself; an aborted one holds the tokens it had by then."""
    info = answer["meta_info"]
    return info["finish_reason"]["type"] in ("stop", "length") and info["completion_tokens"] > 0


def tokens_and_logprobs(answer: dict[str, Any]) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]:
    """The generation's tokens, the one that it stopped at included, and their log-probabilities."""
    info = answer["meta_info"]
    # sglang-jax repeats entries before those of the generation, and leaves special tokens out of output_ids.
    logprobs, token_ids, _ = zip(*info["output_token_logprobs"][-info["completion_tokens"] :], strict=True)
    return np.array(token_ids, np.int32), np.array(logprobs, np.float32)
