"""SGLang servers on the trainer's own device: they free their memory while the trainer computes.

A sleeping server says so in the name of its weights, so that a run that follows one that died finds out. Its memory
comes back without its contents: whoever wakes it pushes weights next.
"""

from collections.abc import Mapping

import httpx

from poly_epo_jax.http_client import ServerError, field, read_json
from poly_epo_jax.rollouts.sglang.requests import SGLANG, post

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
