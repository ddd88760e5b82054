"""HTTP API of SGLang servers and routers, and of sglang-jax, which does not support weight updates."""

from collections.abc import Mapping, Sequence
from reprlib import repr as _brief
from typing import Any

import httpx
import numpy as np

from poly_epo_jax.config.checks import is_url
from poly_epo_jax.rollouts.servers.dialect import Endpoint, ModelInfo, ServerCompletion
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

ANSWER_SECONDS = 10.0  # Timeout of requests for information about a server.


class SGLang:
    """Implements `Dialect` for SGLang."""

    async def wait_for(self, url: str, seconds: float) -> None:
        """Waits until `/v1/models` responds, see `Dialect.wait_for`."""
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
        return Endpoint(url, workers.status_code == 200, update.status_code != 404)

    async def workers(self, url: str, seconds: float) -> list[str]:
        """Returns the workers that `/workers` lists, see `Dialect.workers`."""
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
        """Returns the model that `/model_info` reports."""
        async with open_client(ANSWER_SECONDS) as client:
            answer = await client.get(f"{url}/model_info")
            if answer.status_code == 404:  # Routers and sglang-jax only have the older route.
                answer = await client.get(f"{url}/get_model_info")
        info = {"model_path": "", "tokenizer_path": "", "weight_version": ""} | field(read_json(answer), "", dict)
        return ModelInfo(*(field(info, name, str) for name in ("model_path", "tokenizer_path", "weight_version")))

    async def generate(
        self,
        client: httpx.AsyncClient,
        url: str,
        request: Request,
        indices: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> list[ServerCompletion | InvalidResponseError]:
        """Generates completions with `/generate`, see `Dialect.generate`."""
        response = await client.post(f"{url}/generate", json=_body(request, indices, sampling, stop_ids))
        if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
            reason = f"{response.status_code}: {quote(response.text)}"
            raise ServerError(f"{url} rejected the prompt of problem {request.problem_id} with {reason}")
        return parse_responses(read_json(response), request, len(indices), stop_ids)

    async def pause(self, client: httpx.AsyncClient, url: str) -> None:
        """Aborts all generations and pauses the server."""
        await post(client, url, "pause_generation", {"mode": "abort"})

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        """Resumes a paused server."""
        await post(client, url, "continue_generation", {})

    async def probe_weights(self, client: httpx.AsyncClient, url: str, num_tokens: int) -> tuple[str, int]:
        """Generates one token after `num_tokens` tokens with id 0, see `Dialect.probe_weights`."""
        body = {"input_ids": [0] * num_tokens, "sampling_params": {"max_new_tokens": 1}}
        answer = await post(client, url, "generate", body)
        return field(answer, "meta_info.weight_version", str), field(answer, "meta_info.cached_tokens", int)


SGLANG = SGLang()


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
    }


def parse_responses(
    body: Any, request: Request, count: int, stop_ids: Sequence[int]
) -> list[ServerCompletion | InvalidResponseError]:
    """Parses the response to a generation request.

    Args:
      body: JSON body of the response: one object, or a list of objects.
      request: The request.
      count: Number of seeds that were sent.
      stop_ids: Token ids that end a generation.

    Returns:
      `count` items. Each is a completion, or an `InvalidResponseError` with the reason why it is invalid.

    Raises:
      InvalidResponseError: If the number of completions is not `count`.
    """
    answers = body if isinstance(body, list) else [body]
    if len(answers) != count:
        raise InvalidResponseError(f"the response contains {len(answers)} completions for {count} seeds")
    return [_parse(answer, request, stop_ids) for answer in answers]


def _parse(answer: Any, request: Request, stop_ids: Sequence[int]) -> ServerCompletion | InvalidResponseError:
    try:
        version = _weight_version(field(answer, "meta_info", dict))
        reason = field(answer, "meta_info.finish_reason.type", str)
        if reason == "abort":  # The response contains the tokens generated so far, which are discarded.
            return ServerCompletion(np.zeros(0, np.int64), np.zeros(0), None, version or "")
        if (prompt := field(answer, "meta_info.prompt_tokens", int)) != len(request.prompt_ids):
            raise InvalidResponseError(
                f"prompt_tokens is {prompt}, but the prompt has {len(request.prompt_ids)} tokens"
            )
        token_ids, logprobs = _tokens(answer, is_jax=version is None)
        finish_reason = _finish_reason(answer, reason, token_ids, request.max_tokens, stop_ids)
        return ServerCompletion(np.array(token_ids, np.int64), np.array(logprobs), finish_reason, version or "")
    except InvalidResponseError as error:
        return error


def _weight_version(info: dict[str, Any]) -> str | None:
    """Returns the name of the weights, or None for sglang-jax, which does not report one."""
    if "weight_version" not in info:
        return None
    version = field(info, "weight_version", str)
    spans = [] if info.get("weight_versions") is None else field(info, "weight_versions", list)
    for span in spans:
        if (other := field(span, "version", str)) != version:
            raise InvalidResponseError(f"the tokens were generated with several weight versions, {other} and {version}")
    return version


def _tokens(answer: Any, is_jax: bool) -> tuple[list[int], list[float]]:
    """Returns the tokens and log-probabilities of `output_token_logprobs`, and compares them with `output_ids`."""
    count = field(answer, "meta_info.completion_tokens", int)
    entries = field(answer, "meta_info.output_token_logprobs", list)
    output_ids = field(answer, "output_ids", list)
    # sglang-jax may return repeated entries before the generated tokens, and omits special tokens from output_ids.
    if count < 1 or not (len(entries) >= count if is_jax else len(entries) == len(output_ids) == count):
        raise InvalidResponseError(
            f"completion_tokens is {count}, but the response has {len(entries)} output_token_logprobs and "
            f"{len(output_ids)} output_ids"
        )
    token_ids, logprobs = [], []
    for position, entry in enumerate(entries[-count:]):
        match entry:
            case [float(logprob), int(token_id), *_] if type(token_id) is int and abs(token_id) < 2**31:
                token_ids.append(token_id)
                logprobs.append(logprob)
            case _:
                raise InvalidResponseError(
                    f"output_token_logprobs[{position}] is {_brief(entry)}, not [logprob, token_id, ...]"
                )
    rest = iter(token_ids)  # `in` consumes the iterator, so the order must match.
    if any(type(one) is not int or one not in rest for one in output_ids):
        raise InvalidResponseError("output_ids do not match the tokens of output_token_logprobs")
    return token_ids, logprobs


def _finish_reason(
    answer: Any, reason: str, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]
) -> FinishReason:
    match reason:
        case "length":
            # SGLang reports "length" if a stop token is generated at the maximum length.
            return "stop" if len(token_ids) == max_tokens and token_ids[-1] in stop_ids else "length"
        case "stop":
            # If logits are NaN, SGLang sets `matched` to the string "NaN happened".
            if (matched := field(answer, "meta_info.finish_reason.matched", int)) != token_ids[-1]:
                raise InvalidResponseError(f"it stopped at token {matched}, but its last token is {token_ids[-1]}")
            return "stop"
    raise InvalidResponseError(f"finish_reason.type is {_brief(reason)}, not stop, length or abort")


ASLEEP, EMPTY = "asleep", "empty"
"""Weight versions of a sleeping server, and of a server that was woken but has not loaded weights yet."""


async def release_memory(client: httpx.AsyncClient, url: str) -> None:
    """Aborts the generations of a server, pauses it, and makes it free the memory of its weights and caches.

    Servers that are already asleep are skipped.

    Args:
      client: Client for the HTTP requests.
      url: URL of the server.

    Raises:
      ServerError: If the server fails to free its memory, or was started without --enable-memory-saver.
      httpx.HTTPError: If the server does not respond.
    """
    await _check_memory_saver(client, url)
    if await _is_asleep(url):
        return
    await SGLANG.pause(client, url)  # The requests below would crash a server that is not idle.
    await post(client, url, "update_weight_version", {"new_version": ASLEEP})
    released = await client.post(f"{url}/release_memory_occupation", json={})
    if released.status_code != 200:
        # The server is still awake. With version EMPTY, `wake` skips it. Waking it would crash it.
        await post(client, url, "update_weight_version", {"new_version": EMPTY})
    _check(released, "release its memory")


async def wake(client: httpx.AsyncClient, url: str) -> None:
    """Makes a sleeping server reallocate its memory. The server remains paused.

    Servers that are already awake are skipped, because the request would crash them.

    Args:
      client: Client for the HTTP requests.
      url: URL of the server.

    Raises:
      ServerError: If the server fails to allocate the memory, for example because the trainer occupies it.
      httpx.HTTPError: If the server does not respond.
    """
    if await _is_asleep(url):
        _check(await client.post(f"{url}/resume_memory_occupation", json={}), "reallocate its memory")
        await post(client, url, "update_weight_version", {"new_version": EMPTY})


def check_awake(versions: Mapping[str, str]) -> None:
    """Verifies that no server was left without weights by a run that was killed.

    Args:
      versions: Maps the URL of each server to its weight version.

    Raises:
      ServerError: If the weight version of a server is ASLEEP or EMPTY.
    """
    without = [url for url, version in versions.items() if version in (ASLEEP, EMPTY)]
    if without:
        raise ServerError(
            f"{', '.join(without)} has no weights, because a run with rollouts.options.sleep=True was killed. Restart "
            "it."
        )


async def _is_asleep(url: str) -> bool:
    return (await SGLANG.model_info(url)).weight_version == ASLEEP


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
