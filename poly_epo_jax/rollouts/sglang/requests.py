"""The dialect of SGLang's servers and router; also of sglang-jax, which takes no weights."""

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.http_client import ServerError, describe, open_client, wait_until_healthy
from poly_epo_jax.rollouts.sglang.dialect import Answer, Endpoint, ServedModel
from poly_epo_jax.types import Request, Sampling

ANSWER_SECONDS = 10.0  # of a server that is only asked what it is


class SGLang:
    """Meets `Dialect`."""

    async def wait_for(self, url: str, seconds: float) -> None:
        # Not /health, which generates a token: a server that was left paused would never answer it.
        await wait_until_healthy(f"{url}/v1/models", seconds, f"SGLang server {url}")

    async def probe(self, url: str) -> Endpoint:
        try:
            async with open_client(ANSWER_SECONDS) as client:
                workers = await client.get(f"{url}/workers")
                update = await client.get(f"{url}/update_weights_from_disk")  # 405 where there is one, which is a POST
        except httpx.HTTPError as error:
            raise ServerError(f"{url} does not say what it is: {describe(error)}; see its log.") from error
        if workers.status_code in (401, 403):
            raise ServerError(f"{url} wants a key before it names its workers; start the router without one.")
        return Endpoint(url, workers.status_code == 200, update.status_code != 404)

    async def served_model(self, url: str) -> ServedModel:
        async with open_client(ANSWER_SECONDS) as client:
            answer = await client.get(f"{url}/model_info")
            if answer.status_code == 404:  # a router, or sglang-jax
                answer = await client.get(f"{url}/get_model_info")
        info = answer.raise_for_status().json()
        return ServedModel(info.get("model_path", ""), info.get("tokenizer_path", ""), info.get("weight_version", ""))

    async def generate(
        self,
        client: httpx.AsyncClient,
        url: str,
        request: Request,
        indices: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> list[Answer]:
        response = await client.post(f"{url}/generate", json=_body(request, indices, sampling, stop_ids))
        if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
            reason = response.text.strip()[:500]
            raise ServerError(f"{url} refuses the prompt of problem {request.problem_id}: {reason}")
        answers = response.raise_for_status().json()
        return [_read(answer) for answer in (answers if isinstance(answers, list) else [answers])]

    async def pause(self, client: httpx.AsyncClient, url: str) -> None:
        await post(client, url, "pause_generation", {"mode": "abort"})

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        await post(client, url, "continue_generation", {})

    async def probe_weights(self, client: httpx.AsyncClient, url: str, num_tokens: int) -> tuple[str, int]:
        body = {"input_ids": [0] * num_tokens, "sampling_params": {"max_new_tokens": 1}}
        info = (await post(client, url, "generate", body))["meta_info"]
        return info["weight_version"], info["cached_tokens"]


SGLANG = SGLang()


async def post(client: httpx.AsyncClient, url: str, endpoint: str, body: dict[str, Any]) -> Any:
    """The JSON answer to a control request.

    Raises:
      ServerError: the server refused; the message carries what it said.
      httpx.HTTPError: the connection failed.
    """
    response = await client.post(f"{url}/{endpoint}", json=body)
    if response.status_code != 200 or response.json().get("success") is False:
        raise ServerError(f"{url}/{endpoint} failed ({response.status_code}): {response.text.strip()[:500]}")
    return response.json()


def _body(request: Request, indices: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Several seeds go as a list, which routers do not take."""
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


def _read(answer: dict[str, Any]) -> Answer:
    """An aborted generation holds the tokens it had by then."""
    info = answer["meta_info"]
    reason, count = info["finish_reason"]["type"], info["completion_tokens"]
    is_whole = reason in ("stop", "length") and count > 0
    token_ids, logprobs = _tokens(info, count) if is_whole else (np.zeros(0, np.int32), np.zeros(0, np.float32))
    return Answer(token_ids, logprobs, reason if is_whole else None, info.get("weight_version", ""))


def _tokens(info: dict[str, Any], count: int) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]:
    # sglang-jax repeats entries before those of the generation, and leaves special tokens out of output_ids.
    logprobs, token_ids, _ = zip(*info["output_token_logprobs"][-count:], strict=True)
    return np.array(token_ids, np.int32), np.array(logprobs, np.float32)
