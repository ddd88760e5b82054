"""The dialect of SGLang's servers and router, and of sglang-jax, which takes no weights."""

from collections.abc import Mapping, Sequence
from reprlib import repr as _brief
from typing import Any

import httpx
import numpy as np

from poly_epo_jax.config.checks import is_url
from poly_epo_jax.rollouts.servers.dialect import Answer, Endpoint, ServedModel
from poly_epo_jax.system.http_client import (
    ServerError,
    WrongAnswer,
    describe,
    field,
    open_client,
    printable,
    read_json,
    wait_until_healthy,
)
from poly_epo_jax.types import FinishReason, Request, Sampling

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


def read_answers(body: Any, request: Request, count: int, stop_ids: Sequence[int]) -> list[Answer | WrongAnswer]:
    """The answers to `count` seeds of the request; an answer that cannot be read is replaced by what is wrong with it.

    Raises:
      WrongAnswer: the number of answers is not `count`.
    """
    answers = body if isinstance(body, list) else [body]
    if len(answers) != count:
        raise WrongAnswer(f"it gave {len(answers)} answers to {count} seeds")
    return [_read(answer, request, stop_ids) for answer in answers]


def _read(answer: Any, request: Request, stop_ids: Sequence[int]) -> Answer | WrongAnswer:
    try:
        version = _weight_version(field(answer, "meta_info", dict))
        reason = field(answer, "meta_info.finish_reason.type", str)
        if reason == "abort":  # it holds the tokens generated by then
            return Answer(np.zeros(0, np.int64), np.zeros(0), None, version or "")
        if (prompt := field(answer, "meta_info.prompt_tokens", int)) != len(request.prompt_ids):
            raise WrongAnswer(f"its answer is to a prompt of {prompt} tokens, not {len(request.prompt_ids)}")
        token_ids, logprobs = _tokens(answer, is_jax=version is None)
        finish_reason = _finish_reason(answer, reason, token_ids, request.max_tokens, stop_ids)
        return Answer(np.array(token_ids, np.int64), np.array(logprobs), finish_reason, version or "")
    except WrongAnswer as error:
        return error


def _weight_version(info: dict[str, Any]) -> str | None:
    """The version of the weights; None from sglang-jax, which does not name its weights."""
    if "weight_version" not in info:
        return None
    version = field(info, "weight_version", str)
    spans = [] if info.get("weight_versions") is None else field(info, "weight_versions", list)
    for span in spans:
        if (other := field(span, "version", str)) != version:
            raise WrongAnswer(f"its answer is partly from weights {other}, partly from {version}")
    return version


def _tokens(answer: Any, is_jax: bool) -> tuple[list[int], list[float]]:
    """The tokens of the list that has log-probabilities too; the other list that names tokens must agree."""
    count = field(answer, "meta_info.completion_tokens", int)
    entries = field(answer, "meta_info.output_token_logprobs", list)
    output_ids = field(answer, "output_ids", list)
    # sglang-jax repeats entries before those of the generation, and omits special tokens from output_ids.
    if count < 1 or not (len(entries) >= count if is_jax else len(entries) == len(output_ids) == count):
        raise WrongAnswer(
            f"its answer has completion_tokens {count}, {len(entries)} output_token_logprobs and {len(output_ids)} "
            "output_ids"
        )
    token_ids, logprobs = [], []
    for place, entry in enumerate(entries[-count:]):
        match entry:
            case [float(logprob), int(token_id), *_] if type(token_id) is int and abs(token_id) < 2**31:
                token_ids.append(token_id)
                logprobs.append(logprob)
            case _:
                raise WrongAnswer(f"its answer's output_token_logprobs[{place}] is {_brief(entry)}")
    rest = iter(token_ids)
    if any(type(one) is not int or one not in rest for one in output_ids):  # the order must agree, too
        raise WrongAnswer("its answer's output_ids are not the tokens of its output_token_logprobs")
    return token_ids, logprobs


def _finish_reason(
    answer: Any, reason: str, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]
) -> FinishReason:
    match reason:
        case "length":
            # SGLang checks the length before it checks the last token.
            return "stop" if len(token_ids) == max_tokens and token_ids[-1] in stop_ids else "length"
        case "stop":
            # After a NaN, `matched` is "NaN happened".
            if (matched := field(answer, "meta_info.finish_reason.matched", int)) != token_ids[-1]:
                raise WrongAnswer(f"its answer stopped at token {matched}, but its last token is {token_ids[-1]}")
            return "stop"
    raise WrongAnswer(f"its answer's meta_info.finish_reason.type is {_brief(reason)}, none of stop, length and abort")


ASLEEP, EMPTY = "asleep", "empty"
"""What a server calls its weights before and after it is woken."""


async def lay_down(client: httpx.AsyncClient, url: str) -> None:
    """Aborts what the server is generating, if anything, and has it free weights and caches. Then it only waits.

    Raises:
      ServerError: the server cannot do so, or was started without --enable-memory-saver.
      httpx.HTTPError: it does not answer.
    """
    await _check_able(client, url)
    if await _sleeps(url):
        return
    await SGLANG.pause(client, url)  # a server that is not idle would die of the next requests
    await post(client, url, "update_weight_version", {"new_version": ASLEEP})
    released = await client.post(f"{url}/release_memory_occupation", json={})
    if released.status_code != 200:  # it is awake, and nobody is to wake it
        await post(client, url, "update_weight_version", {"new_version": EMPTY})
    _check(released, "give up its memory")


async def wake(client: httpx.AsyncClient, url: str) -> None:
    """Has a sleeping server take its memory back; it remains paused. A server that is awake would die of this request.

    Raises:
      ServerError: it cannot, because the trainer holds the memory.
      httpx.HTTPError: it does not answer.
    """
    if await _sleeps(url):
        _check(await client.post(f"{url}/resume_memory_occupation", json={}), "take its memory back")
        await post(client, url, "update_weight_version", {"new_version": EMPTY})


def check_awake(versions: Mapping[str, str]) -> None:
    """Refuses servers, by URL, if the name of their weights says that a run that died left them without weights.

    Raises:
      ServerError: the message names those servers.
    """
    without = [url for url, version in versions.items() if version in (ASLEEP, EMPTY)]
    if without:
        raise ServerError(
            f"{', '.join(without)} holds no weights: a run with rollouts.options.sleep=True has left it so. Start it "
            "again."
        )


async def _sleeps(url: str) -> bool:
    return (await SGLANG.served_model(url)).weight_version == ASLEEP


async def _check_able(client: httpx.AsyncClient, url: str) -> None:
    if not field(read_json(await client.get(f"{url}/server_info")), "enable_memory_saver", bool):
        raise ServerError(
            f"{url} was started without --enable-memory-saver and cannot give up its memory; start it with that, or "
            "set rollouts.options.sleep=False."
        )


def _check(answer: httpx.Response, deed: str) -> None:
    """Checks the status only: these two endpoints answer with nothing that could be read."""
    if answer.status_code != 200:
        raise ServerError(
            f"{answer.request.url.copy_with(path='')} cannot {deed} ({answer.status_code}); see its log, and leave "
            "it enough by --mem-fraction-static and the trainer's XLA_PYTHON_CLIENT_MEM_FRACTION."
        )
