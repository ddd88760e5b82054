"""The dialect of SGLang's servers and router, and of sglang-jax, which takes no weights."""

from collections.abc import Sequence
from typing import Any

import httpx

from poly_epo_jax.checks import is_url
from poly_epo_jax.http_client import (
    ServerError,
    WrongAnswer,
    describe,
    field,
    open_client,
    printable,
    read_json,
    wait_until_healthy,
)
from poly_epo_jax.rollouts.sglang.answers import read_answers
from poly_epo_jax.rollouts.sglang.dialect import Answer, Endpoint, ServedModel
from poly_epo_jax.types import Request, Sampling

ANSWER_SECONDS = 10.0  # for a server that is only asked what it is


class SGLang:
    """Implements `Dialect`."""

    async def wait_for(self, url: str, seconds: float) -> None:
        # Not /health, which generates a token: a server that was left paused would never answer it.
        await wait_until_healthy(f"{url}/v1/models", seconds, f"SGLang server {url}")

    async def probe(self, url: str) -> Endpoint:
        try:
            async with open_client(ANSWER_SECONDS) as client:
                workers = await client.get(f"{url}/workers")
                update = await client.get(f"{url}/update_weights_from_disk")  # 405 if it exists, as it is a POST
        except httpx.HTTPError as error:
            raise ServerError(f"{url} does not say what it is: {describe(error)}; see its log.") from error
        if workers.status_code in (401, 403):
            raise ServerError(f"{url} wants a key before it names its workers; start the router without one.")
        return Endpoint(url, workers.status_code == 200, update.status_code != 404)

    async def workers(self, url: str, seconds: float) -> list[str]:
        await wait_until_healthy(f"{url}/health", seconds, f"SGLang router {url}")
        try:
            async with open_client(ANSWER_SECONDS) as client:
                answer = read_json(await client.get(f"{url}/workers"))
            urls = [field(worker, "url", str) for worker in field(answer, "workers", list)]
            if not all(map(is_url, urls)):
                raise WrongAnswer("a worker's URL is not of the form http://HOST:PORT, without a password")
        except httpx.HTTPError as error:
            raise ServerError(f"The router {url} does not name its workers: {describe(error)}.") from error
        return urls

    async def served_model(self, url: str) -> ServedModel:
        async with open_client(ANSWER_SECONDS) as client:
            answer = await client.get(f"{url}/model_info")
            if answer.status_code == 404:  # a router, or sglang-jax
                answer = await client.get(f"{url}/get_model_info")
        info = {"model_path": "", "tokenizer_path": "", "weight_version": ""} | field(read_json(answer), "", dict)
        return ServedModel(*(field(info, name, str) for name in ("model_path", "tokenizer_path", "weight_version")))

    async def generate(
        self,
        client: httpx.AsyncClient,
        url: str,
        request: Request,
        indices: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> list[Answer | WrongAnswer]:
        response = await client.post(f"{url}/generate", json=_body(request, indices, sampling, stop_ids))
        if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
            reason = f"{response.status_code}: {printable(response.text)}"
            raise ServerError(f"{url} refuses the prompt of problem {request.problem_id} with {reason}")
        return read_answers(read_json(response), request, len(indices), stop_ids)

    async def pause(self, client: httpx.AsyncClient, url: str) -> None:
        await post(client, url, "pause_generation", {"mode": "abort"})

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        await post(client, url, "continue_generation", {})

    async def probe_weights(self, client: httpx.AsyncClient, url: str, num_tokens: int) -> tuple[str, int]:
        body = {"input_ids": [0] * num_tokens, "sampling_params": {"max_new_tokens": 1}}
        answer = await post(client, url, "generate", body)
        return field(answer, "meta_info.weight_version", str), field(answer, "meta_info.cached_tokens", int)


SGLANG = SGLang()


async def post(client: httpx.AsyncClient, url: str, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer to a control request.

    Raises:
      ServerError: the server refused; the message includes what it said.
      httpx.HTTPError: the connection failed, or the answer is not a JSON object.
    """
    response = await client.post(f"{url}/{endpoint}", json=body)
    answer = field(read_json(response), "", dict) if response.status_code == 200 else {"success": False}
    if answer.get("success", True) is not True:
        raise ServerError(f"{url}/{endpoint} failed ({response.status_code}): {printable(response.text)}")
    return answer


def _body(request: Request, indices: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, Any]:
    """The body of a request. Several seeds are sent as a list, which routers do not accept."""
    parameters = {
        "max_new_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(stop_ids),
    }
    prompt_ids: list = request.prompt_ids.tolist()
    each = [parameters | {"sampling_seed": int(request.seeds[i]) >> 1} for i in indices]  # SGLang's seeds are signed
    is_list = len(indices) > 1
    return {
        "input_ids": [prompt_ids] * len(indices) if is_list else prompt_ids,
        "sampling_params": each if is_list else each[0],
        "return_logprob": True,
    }
