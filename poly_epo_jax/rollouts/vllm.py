"""HTTP API of vLLM servers, from version 0.30 on. Version 0.32.0 has been tested."""

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as _brief
from typing import Any

import httpx
import numpy as np

from poly_epo_jax.rollouts.servers.dialect import (
    Dialect,
    Endpoint,
    ModelInfo,
    ServerCompletion,
    WeightSpan,
    check_accepted,
)
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
from poly_epo_jax.types import FinishReason, Request, Sampling

ANSWER_SECONDS = 60.0  # The first request to /server_info takes 6 s, because it collects the versions of packages.
GENERATE = "inference/v1/generate"
OUTSIDE = 2**31 - 1  # A token id that is in no vocabulary.


@dataclasses.dataclass(frozen=True)
class VLLM(Dialect):
    """Requests to vLLM servers. Servers must be started with the settings that `probe` verifies.

    Attributes:
      vocab_size: Size of the vocabulary that the servers must have. If 0, it is not verified.
      context_tokens: Minimum context length, for a prompt and its generation. If 0, it is not verified.
      temperature: Temperature of sampling.
    """

    vocab_size: int = 0
    context_tokens: int = 0
    temperature: float = 1.0

    max_cache_block = 128  # Number of tokens of a block on CPUs. Blocks on GPUs have 16 tokens.

    async def wait_for(self, url: str, seconds: float) -> None:
        await wait_until_healthy(f"{url}/health", seconds, f"vLLM server {url}")

    async def probe(self, url: str) -> Endpoint:
        """Verifies the settings of a server. Routers are not supported.

        Raises:
          ServerError: If the server does not respond, or was started with other settings. The message names the flag.
        """
        try:
            async with open_client(ANSWER_SECONDS) as client:
                model = await _model_config(client, url)
                # The server rejects this request before it generates, also while it is paused.
                rejection = await client.post(
                    f"{url}/{GENERATE}",
                    json={"token_ids": [0], "sampling_params": {"max_tokens": 1, "stop_token_ids": [OUTSIDE]}},
                )
        except httpx.HTTPError as error:
            raise ServerError(f"Failed to identify the server {url}: {describe_error(error)}; see its log.") from error
        if rejection.status_code == 403:
            raise ServerError(f"{url} does not generate from token ids; start it with --enable-scale-out.")
        found = re.search(r"Vocabulary size: (\d+)", rejection.text)
        if found is None:
            raise ServerError(
                f"{url} does not report the size of its vocabulary ({rejection.status_code}: "
                f"{quote(rejection.text)}); use vLLM 0.30 or newer."
            )
        self._check_model(url, int(found[1]), model)
        return Endpoint(url, is_router=False)

    def _check_model(self, url: str, vocab_size: int, model: dict[str, Any]) -> None:
        context, mode = field(model, "max_model_len", int), field(model, "logprobs_mode", str)
        if self.vocab_size and vocab_size != self.vocab_size:
            raise ServerError(
                f"{url} serves a model with a vocabulary of {vocab_size} tokens, but that of the policy has "
                f"{self.vocab_size}; start it with the policy."
            )
        if context < self.context_tokens:
            raise ServerError(
                f"{url} has a context of {context} tokens, but a prompt and its response may have "
                f"{self.context_tokens}; start it with --max-model-len {self.context_tokens}, or lower "
                "train.max_prompt_tokens or sampling.max_tokens."
            )
        if mode != "processed_logprobs" and (mode != "raw_logprobs" or self.temperature != 1):
            raise ServerError(
                f"{url} returns log-probabilities with --logprobs-mode {mode}, which ignores "
                f"sampling.temperature={self.temperature:g}; start it with --logprobs-mode processed_logprobs."
            )

    async def model_info(self, url: str) -> ModelInfo:
        async with open_client(ANSWER_SECONDS) as client:
            model = await _model_config(client, url)
            version = field(read_json(await client.get(f"{url}/weight_info")), "weight_version", str)
        return ModelInfo(field(model, "model", str), field(model, "tokenizer", str), version)

    async def generate(
        self,
        client: httpx.AsyncClient,
        url: str,
        request: Request,
        indices: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> list[ServerCompletion | InvalidResponseError]:
        """Sends one request per seed, because one request only accepts consecutive seeds. See `Dialect.generate`."""
        parameters = {
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(stop_ids),
            "ignore_eos": True,  # Otherwise, end tokens of the model that are not in stop_token_ids end a generation.
            "logprobs": 0,  # Log-probabilities of the generated tokens only.
            "detokenize": False,
        }
        prompt_ids: list = request.prompt_ids.tolist()
        salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}

        async def one(index: int) -> ServerCompletion | InvalidResponseError:
            body = {
                "token_ids": prompt_ids,
                "sampling_params": parameters | {"seed": int(request.seeds[index])},
                **salt,
            }
            response = await client.post(f"{url}/{GENERATE}", json=body)
            check_accepted(response, url, request)
            try:
                completion = parse_response(read_json(response), request)
            except InvalidResponseError as error:
                return error
            if completion.finish_reason == "length" and len(completion.token_ids) < request.max_tokens:
                raise ServerError(
                    f"{url} ended a response to problem {request.problem_id!r} after {len(completion.token_ids)} of "
                    f"{request.max_tokens} tokens, at the end of its context; start it with a larger --max-model-len."
                )
            return completion

        answers = await asyncio.gather(*map(one, indices), return_exceptions=True)
        completions: list[ServerCompletion | InvalidResponseError] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, InvalidResponseError):
                raise answer
            completions.append(answer)
        return completions

    async def pause(self, client: httpx.AsyncClient, url: str, keep: bool = False) -> None:
        await _post(client, f"{url}/pause?mode={'keep' if keep else 'abort'}")

    async def load_folder(self, client: httpx.AsyncClient, url: str, folder: Path, version: str) -> None:
        """Loads weights with `reload_weights`, names them, and empties the prefix cache. See `Dialect.load_folder`.

        Raises:
          FileNotFoundError: If the folder has no weights. The request would terminate the server.
          ServerError: If the server does not load the weights. It terminates if it cannot read the folder.
          httpx.HTTPError: If the connection fails.
        """
        if not any(folder.glob("*.safetensors")):
            raise FileNotFoundError(f"{folder} has no weights: another process removed them; rerun the command.")
        loaded = await client.post(
            f"{url}/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        )
        if loaded.status_code != 200:  # Not retried, because a server that restarts would be terminated again.
            raise ServerError(
                f"{url} failed to load weights from {folder} ({loaded.status_code}: {quote(loaded.text)}) and may have "
                "terminated; see its log, and set rollouts.weights_dir to a folder that its host and user can read."
            )
        await _post(client, f"{url}/update_weight_version", {"new_version": version})
        # Without reset_running_requests, the cache would not be emptied while generations are kept.
        emptied = await _post(client, f"{url}/reset_prefix_cache?reset_external=true&reset_running_requests=true")
        if emptied.get("success") is not True:
            raise ServerError(f"{url} did not empty its prefix cache after an update to {version}; restart it.")

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        await _post(client, f"{url}/resume")

    async def checksums(
        self, client: httpx.AsyncClient, url: str, skipped_layers: Sequence[int]
    ) -> list[dict[str, str]] | None:
        """Returns the checksums of `/weight_checker`, which computes those of all layers. See `Dialect.checksums`."""
        if (await _model_config(client, url)).get("quantization"):
            return None
        found = field(await _post(client, f"{url}/weight_checker", {"action": "checksum"}), "checksums", dict)
        ranks: dict[str, dict[str, str]] = {}
        for key, checksum in found.items():
            rank, _, name = key.rpartition(":")
            name = name.replace(".routed_experts.", ".")  # SGLang stores experts without this level.
            ranks.setdefault(rank, {})[name] = field({"checksum": checksum}, "checksum", str)
        return list(ranks.values())

    async def rename_weights(self, client: httpx.AsyncClient, url: str, version: str) -> None:
        await _post(client, f"{url}/update_weight_version", {"new_version": version})

    async def sleep(self, client: httpx.AsyncClient, url: str) -> None:
        """Raises ServerError, because the sleep mode of vLLM, which requires a GPU, has not been tested."""
        raise ServerError(f"{url} cannot sleep, because the sleep mode of vLLM is not supported.")


async def _model_config(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Returns the model section of the server's configuration.

    Raises:
      ServerError: If the server was started without its development mode, which provides the route.
      httpx.HTTPError: If the server does not respond or its response is invalid.
    """
    response = await client.get(f"{url}/server_info", params={"config_format": "json"})
    if response.status_code == 404:
        raise ServerError(
            f"{url} has no routes for settings and weight updates; start vLLM 0.30 or newer with the environment "
            "variable VLLM_SERVER_DEV_MODE=1."
        )
    return field(read_json(response), "vllm_config.model_config", dict)


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sends a control request, and returns the JSON body of the response.

    Raises:
      ServerError: If the server rejects the request.
      httpx.HTTPError: If the connection or the server fails, or the response is not a JSON object.
    """
    response = await client.post(url, json=body or {})
    if 400 <= response.status_code < 500:
        raise ServerError(f"{url} failed ({response.status_code}): {quote(response.text)}")
    return field(read_json(response), "", dict)


def parse_response(answer: Any, request: Request) -> ServerCompletion:
    """Parses the response to a generation request with one seed.

    Args:
      answer: JSON body of the response.
      request: The request.

    Returns:
      The completion.

    Raises:
      InvalidResponseError: If the response is invalid.
    """
    choices = field(answer, "choices", list)
    if len(choices) != 1:
        raise InvalidResponseError(f"the response contains {len(choices)} completions for one seed")
    choice = choices[0]
    reason, spans = field(choice, "finish_reason", str), field(choice, "weight_versions", list)
    weights = [
        WeightSpan(field(one, "start", int), field(one, "end", int), field(one, "version", str)) for one in spans
    ]
    if reason == "abort":  # The response contains the tokens generated so far, which are discarded.
        return ServerCompletion(np.zeros(0, np.int64), np.zeros(0), None, weights)
    if (prompt := field(answer, "usage.prompt_tokens", int)) != len(request.prompt_ids):
        raise InvalidResponseError(f"prompt_tokens is {prompt}, but the prompt has {len(request.prompt_ids)} tokens")
    token_ids, logprobs = _tokens(choice)
    if not weights:
        raise InvalidResponseError("weight_versions of its response is empty")
    finish_reason, ids = _finish_reason(choice, reason), np.array(token_ids, np.int64)
    details = answer["usage"].get("prompt_tokens_details")  # None without --enable-prompt-tokens-details.
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return ServerCompletion(ids, np.array(logprobs), finish_reason, weights, cached)


def _tokens(choice: Any) -> tuple[list[int], list[float]]:
    """Returns the tokens and log-probabilities of `logprobs`, and compares the tokens with `token_ids`."""
    entries = field(choice, "logprobs.content", list)
    token_ids = [field(entry, "token_id", int) for entry in entries]
    logprobs = [field(entry, "logprob", float) for entry in entries]
    if not token_ids or token_ids != field(choice, "token_ids", list) or max(map(abs, token_ids)) >= 2**31:
        raise InvalidResponseError(f"token_ids do not match the {len(token_ids)} tokens of logprobs")
    return token_ids, logprobs


def _finish_reason(choice: Any, reason: str) -> FinishReason:
    match reason:
        case "length":
            return "length"
        case "stop":
            stopped, last = field(choice, "stop_reason", int), field(choice, "token_ids", list)[-1]
            if stopped != last:
                raise InvalidResponseError(f"it stopped at token {stopped}, but its last token is {last}")
            return "stop"
    raise InvalidResponseError(f"finish_reason is {_brief(reason)}, not stop, length or abort")
