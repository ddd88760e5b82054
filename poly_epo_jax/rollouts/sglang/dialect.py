"""HTTP API of SGLang servers and routers, and of sglang-jax, which does not support weight updates."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from poly_epo_jax.config.checks import is_url
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.layer_settings import full_attention_interval
from poly_epo_jax.rollouts.servers.dialect import Dialect, Endpoint, ModelInfo, ServerCompletion, check_accepted
from poly_epo_jax.rollouts.sglang.responses import parse_responses
from poly_epo_jax.system.http_client import (
    InvalidResponseError,
    ServerError,
    describe_error,
    field,
    open_client,
    quote,
    read_json,
    wait_until_healthy,
)
from poly_epo_jax.types import Request, Sampling

ANSWER_SECONDS = 10.0  # Timeout of requests for information about a server.
ASLEEP, EMPTY = "asleep", "empty"
"""Weight versions of a sleeping server, and of a server that was woken but has not loaded weights yet."""


class SGLang(Dialect):
    """Requests to SGLang servers."""

    max_cache_block = 64

    async def wait_for(self, url: str, seconds: float) -> None:
        # /health is not used, because it generates a token, which a paused server never does.
        await wait_until_healthy(f"{url}/v1/models", seconds, f"SGLang server {url}")

    async def probe(self, url: str) -> Endpoint:
        """Recognizes routers by `/workers` and servers that accept weights by `/update_weights_from_disk`."""
        try:
            async with open_client(ANSWER_SECONDS) as client:
                workers = await client.get(f"{url}/workers")
                update = await client.get(f"{url}/update_weights_from_disk")  # 405 if this POST route exists.
        except httpx.HTTPError as error:
            raise ServerError(f"Failed to identify the server {url}: {describe_error(error)}; see its log.") from error
        if workers.status_code in (401, 403):
            raise ServerError(f"{url} requires an API key to list its workers; start the router without an API key.")
        missing = (
            f"{url} does not support weight updates: it has no route /update_weights_from_disk (sglang-jax has none). "
            "It can only be evaluated; train with SGLang servers or rollouts.name=embedded."
        )
        return Endpoint(url, workers.status_code == 200, missing if update.status_code == 404 else "")

    async def workers(self, url: str, seconds: float) -> list[str]:
        await wait_until_healthy(f"{url}/health", seconds, f"SGLang router {url}")
        try:
            async with open_client(ANSWER_SECONDS) as client:
                answer = read_json(await client.get(f"{url}/workers"))
            urls = [field(worker, "url", str) for worker in field(answer, "workers", list)]
            if not all(map(is_url, urls)):
                raise InvalidResponseError(
                    "the URL of a worker must have the form http://HOST:PORT, without a password"
                )
        except httpx.HTTPError as error:
            raise ServerError(
                f"Failed to list the workers of router {url}: {describe_error(error)}; see its log."
            ) from error
        return urls

    async def model_info(self, url: str) -> ModelInfo:
        async with open_client(ANSWER_SECONDS) as client:
            answer = await client.get(f"{url}/model_info")
            if answer.status_code == 404:  # Routers and sglang-jax only have the older route.
                answer = await client.get(f"{url}/get_model_info")
        info = {"model_path": "", "tokenizer_path": "", "weight_version": ""} | field(read_json(answer), "", dict)
        path, tokenizer, version = (
            field(info, name, str) for name in ("model_path", "tokenizer_path", "weight_version")
        )
        return ModelInfo(path, tokenizer, version, has_weights=version not in (ASLEEP, EMPTY))

    async def generate(
        self,
        client: httpx.AsyncClient,
        url: str,
        request: Request,
        indices: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> list[ServerCompletion | InvalidResponseError]:
        response = await client.post(f"{url}/generate", json=_body(request, indices, sampling, stop_ids))
        check_accepted(response, url, request)
        return parse_responses(read_json(response), request, len(indices), stop_ids)

    async def pause(self, client: httpx.AsyncClient, url: str, keep: bool = False) -> None:
        if await self._is_asleep(url):  # A previous run may have been killed while the server was asleep.
            _check(await client.post(f"{url}/resume_memory_occupation", json={}), "reallocate its memory")
            await post(client, url, "update_weight_version", {"new_version": EMPTY})
        # Mode in_place would keep the cache in use, so that it could not be emptied.
        await post(client, url, "pause_generation", {"mode": "retract" if keep else "abort"})

    async def load_folder(self, client: httpx.AsyncClient, url: str, folder: Path, version: str) -> None:
        await post(
            client,
            url,
            "update_weights_from_disk",
            {"model_path": str(folder), "weight_version": version, "flush_cache": True},
        )

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        await post(client, url, "continue_generation", {})

    async def checksums(
        self, client: httpx.AsyncClient, url: str, skipped_layers: Sequence[int]
    ) -> list[dict[str, str]] | None:
        if field(read_json(await client.get(f"{url}/server_info")), "", dict).get("quantization"):
            return None
        response = await client.post(
            f"{url}/weights_checker",
            json={"action": "checksum", "skip_tensor_list": [f".layers.{layer}." for layer in skipped_layers]},
        )
        if 400 <= response.status_code < 500:
            return []
        return [
            {
                _with_attention(name): field({"checksum": one}, "checksum", str)
                for name, one in field(rank, "checksums", dict).items()
            }
            for rank in field(read_json(response), "ranks", list)
        ]

    async def rename_weights(self, client: httpx.AsyncClient, url: str, version: str) -> None:
        await post(client, url, "update_weight_version", {"new_version": version})

    async def sleep(self, client: httpx.AsyncClient, url: str) -> None:
        await _check_memory_saver(client, url)
        if await self._is_asleep(url):
            return
        # The requests below would crash a server that is not idle.
        await post(client, url, "pause_generation", {"mode": "abort"})
        await post(client, url, "update_weight_version", {"new_version": ASLEEP})
        released = await client.post(f"{url}/release_memory_occupation", json={})
        if released.status_code != 200:
            # The server is still awake. With version EMPTY, `pause` does not wake it, which would crash it.
            await post(client, url, "update_weight_version", {"new_version": EMPTY})
        _check(released, "release its memory")

    async def _is_asleep(self, url: str) -> bool:
        return (await self.model_info(url)).weight_version == ASLEEP


SGLANG = SGLang()


def check_network(config: ModelConfig, max_tokens: int) -> None:
    """Verifies that SGLang computes the network of the policy. Version 0.5.23 has been tested.

    Args:
      config: Configuration of the policy.
      max_tokens: Maximum number of tokens of a sequence.

    Raises:
      ConfigError: If it ignores a window that is shorter than a sequence, a weight, or the types of the layers.
    """
    window = max(config.windows)
    if config.family == "mistral" and 0 < window < max_tokens:
        raise ConfigError(
            f"SGLang ignores sliding_window={window} of model.path, but sequences may have {max_tokens} tokens; set "
            "rollouts.name=vllm, or reduce train.max_prompt_tokens or sampling.max_tokens."
        )
    if config.family == "gemma3_text" and not config.tie_word_embeddings:
        raise ConfigError(
            "SGLang ignores tie_word_embeddings=False of model.path and computes logits with the embedding; set "
            "rollouts.name=vllm."
        )
    if config.family == "qwen3_5_text" and full_attention_interval(config) is None:
        raise ConfigError(
            "SGLang ignores layer_types of model.path, which must be full_attention in exactly every N-th layer; set "
            "rollouts.name=vllm."
        )


def _with_attention(name: str) -> str:
    """Inserts `self_attn` into names of Qwen3.5, which SGLang stores without this level."""
    return re.sub(r"(\.layers\.\d+\.)(qkv_proj|o_proj|q_norm|k_norm)\.", r"\1self_attn.\2.", name)


async def post(client: httpx.AsyncClient, url: str, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends a control request to a server.

    Args:
      client: Client for the HTTP request.
      url: URL of the server.
      endpoint: Name of the route.
      body: JSON body of the request.

    Returns:
      The JSON body of the response.

    Raises:
      ServerError: If the request fails. The message contains the server's error message.
      httpx.HTTPError: If the connection fails, or the response is not a JSON object.
    """
    response = await client.post(f"{url}/{endpoint}", json=body)
    answer = field(read_json(response), "", dict) if response.status_code == 200 else {"success": False}
    if answer.get("success", True) is not True:
        raise ServerError(f"{url}/{endpoint} failed ({response.status_code}): {quote(response.text)}")
    return answer


def _body(request: Request, indices: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Returns the body of a generation request. Several seeds are sent as a list, which routers do not accept."""
    parameters = {
        "max_new_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(stop_ids),
    }
    prompt_ids: list = request.prompt_ids.tolist()
    each = [parameters | {"sampling_seed": int(request.seeds[i]) >> 1} for i in indices]  # SGLang seeds are signed.
    is_list = len(indices) > 1
    return {
        "input_ids": [prompt_ids] * len(indices) if is_list else prompt_ids,
        "sampling_params": each if is_list else each[0],
        "return_logprob": True,
    } | ({"cache_salt": request.cache_salt} if request.cache_salt else {})


async def _check_memory_saver(client: httpx.AsyncClient, url: str) -> None:
    if not field(read_json(await client.get(f"{url}/server_info")), "enable_memory_saver", bool):
        raise ServerError(
            f"{url} cannot release its memory; start it with --enable-memory-saver, or set "
            "rollouts.options.sleep=False."
        )


def _check(answer: httpx.Response, action: str) -> None:
    """Raises ServerError if the status is not 200. The responses of the two memory routes have no body."""
    if answer.status_code != 200:
        raise ServerError(
            f"{answer.request.url.copy_with(path='')} cannot {action} ({answer.status_code}); see its log, and "
            "reserve memory for it with --mem-fraction-static and the trainer's XLA_PYTHON_CLIENT_MEM_FRACTION."
        )
