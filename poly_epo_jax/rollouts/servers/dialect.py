"""How to talk to servers of one kind: which requests they understand, and how to read their answers.

The rest of this package knows nothing of requests and answers, except for `weight_sync`, each of whose
classes loads weights in one way into one kind of server. Another kind of server therefore takes a class that meets
`Dialect`, in a file beside `sglang.py`, and a line in `rollouts.SAMPLERS`.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import httpx
import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.system.http_client import WrongAnswer
from poly_epo_jax.types import FinishReason, Request, Sampling


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """What is at a URL: a router, whose workers may take weights, or a server, which may take them itself."""

    url: str
    is_router: bool
    takes_weights: bool


class ServedModel(NamedTuple):
    """A server's model: where its weights and tokenizer come from, and the weights' name, if they have one."""

    path: str
    tokenizer_path: str
    weight_version: str


class Answer(NamedTuple):
    """A generation of T tokens, the stop token included; `finish_reason` is None if it was aborted."""

    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    finish_reason: FinishReason | None
    weight_version: str


@runtime_checkable
class Dialect(Protocol):
    """Requests that a server understands. Each raises httpx.HTTPError if the server answers wrongly or not at all."""

    async def wait_for(self, url: str, seconds: float) -> None:
        """Returns once whatever is at `url` answers; a router answers once it has a worker.

        Raises:
          ServerError: it did not answer within `seconds`.
        """
        ...

    async def probe(self, url: str) -> Endpoint:
        """Finds out what is at `url`.

        Raises:
          ServerError: the server does not say.
        """
        ...

    async def workers(self, url: str, seconds: float) -> list[str]:
        """The servers behind a router, once it answers.

        Raises:
          ServerError: it did not answer within `seconds`, or does not name them.
        """
        ...

    async def served_model(self, url: str) -> ServedModel:
        """What the server reports about its model."""
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
        """A generation for each of the request's seeds at `indices`, all from weights of one version.

        A router is given one seed at a time. An answer that cannot be read is replaced by what is wrong with it.

        Raises:
          ServerError: the server refuses the request, and would refuse it again.
        """
        ...

    async def pause(self, client: httpx.AsyncClient, url: str) -> None:
        """Aborts what the server is generating, so that it can be given weights."""
        ...

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        """Lets the server continue."""
        ...

    async def probe_weights(self, client: httpx.AsyncClient, url: str, num_tokens: int) -> tuple[str, int]:
        """Generates one token after a prompt of `num_tokens`, which is the same each time.

        Returns:
          The version of the weights that generated the token, and how much of the prompt came from a cache.
        """
        ...
