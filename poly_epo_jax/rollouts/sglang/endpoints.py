"""What stands at a URL: an SGLang server, SGLang's router, or a server such as sglang-jax that takes no weights."""

import dataclasses
from typing import Any

import httpx

from poly_epo_jax.http_client import ServerError, describe, open_client, wait_until_healthy

ANSWER_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A router has workers, which take weights or not; a server takes them itself or not."""

    url: str
    is_router: bool
    takes_weights: bool


async def wait_for(url: str, seconds: float) -> None:
    """Returns once whatever is at `url` answers; a router answers once it has a worker.

    Raises:
      ServerError: it did not within `seconds`.
    """
    # Not /health, which generates a token: a server that was left paused would never answer it.
    await wait_until_healthy(f"{url}/v1/models", seconds, f"SGLang server {url}")


async def probe(url: str, wait_seconds: float) -> Endpoint:
    """Asks what is at `url`, once it answers.

    Raises:
      ServerError: it does not, or not what can be understood.
    """
    await wait_for(url, wait_seconds)
    try:
        async with open_client(ANSWER_SECONDS) as client:
            workers = await client.get(f"{url}/workers")
            update = await client.get(f"{url}/update_weights_from_disk")  # 405, as it wants a POST, where there is one
    except httpx.HTTPError as error:
        raise ServerError(f"{url} does not say what it is: {describe(error)}; see its log.") from error
    if workers.status_code in (401, 403):
        raise ServerError(f"{url} wants a key before it names its workers; start the router without one.")
    return Endpoint(url, workers.status_code == 200, update.status_code != 404)


async def served_model(url: str) -> dict[str, Any]:
    """What the server says of its model: model_path, tokenizer_path, and weight_version where weights have one.

    Raises:
      httpx.HTTPError: it does not say.
    """
    async with open_client(ANSWER_SECONDS) as client:
        info = await client.get(f"{url}/model_info")
        if info.status_code == 404:  # a router, or sglang-jax
            info = await client.get(f"{url}/get_model_info")
        return info.raise_for_status().json()
