"""How servers of one kind are spoken to: what is asked of them, and how their answers are read.

The rest of this room knows no request and no answer, apart from `router`, which is SGLang's own, and `weight_sync`,
whose classes each load weights in one way of one kind of server. So another kind is a class that meets `Dialect` in a
file of its own, and a line in `rollouts.SAMPLERS`.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import httpx
import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.http_client import WrongAnswer
from poly_epo_jax.types import FinishReason, Request, Sampling


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """What is at a URL. A router has workers, which take weights or not; a server takes them itself or not."""

    url: str
    is_router: bool
    takes_weights: bool


class ServedModel(NamedTuple):
    """A server's model: where its weights and its tokenizer are from, and what the weights are called, if anything."""

    path: str
    tokenizer_path: str
    weight_version: str


class Answer(NamedTuple):
    """A generation of T tokens, the stop token included; `finish_reason` is None where it was broken off."""

    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    finish_reason: FinishReason | None
    weight_version: str


@runtime_checkable
class Dialect(Protocol):
    """Requests that a server understands. Each raises httpx.HTTPError where the server does not answer, or wrongly."""

    async def wait_for(self, url: str, seconds: float) -> None:
        """Returns once whatever is at `url` answers; a router answers once it has a worker.

        Raises:
          ServerError: it did not within `seconds`.
        """
        ...

    async def probe(self, url: str) -> Endpoint:
        """What is at `url`.

        Raises:
          ServerError: it does not say.
        """
        ...

    async def served_model(self, url: str) -> ServedModel:
        """What the server says of its model."""
        ...

    async def generate(
        self,
        client: httpx.AsyncClient,
        url: str,
        request: Request,
        indices: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> Sequence[Answer | WrongAnswer]:
        """A generation for each of these seeds of the request, all from weights of one version. Routers get one seed.

        In place of an answer that cannot be read is what is wrong with it.

        Raises:
          ServerError: the server refuses the request, as it would again.
        """
        ...

    async def pause(self, client: httpx.AsyncClient, url: str) -> None:
        """Breaks off what the server generates, so that it can be given weights."""
        ...

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        """Lets the server go on."""
        ...

    async def probe_weights(self, client: httpx.AsyncClient, url: str, num_tokens: int) -> tuple[str, int]:
        """Generates one token after the same prompt of `num_tokens` each time.

        Returns:
          The version of the weights that it was from, and how much of the prompt came from a cache.
        """
        ...
