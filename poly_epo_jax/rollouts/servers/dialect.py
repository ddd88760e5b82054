"""The interface to the HTTP API of a kind of inference server.

The rest of this package is independent of the API. To support another kind of server, implement `Dialect` in a module
next to this package, and register a sampler in `rollouts.SAMPLERS`.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import httpx
import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.system.http_client import InvalidResponseError, RequestError, quote
from poly_epo_jax.types import FinishReason, Request, Sampling


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The kind of server at a URL.

    Attributes:
      url: URL of the server.
      is_router: Whether it is a router, which forwards prompts to its workers.
      update_error: Error message if it does not accept new weights, otherwise empty. The value of a router does not
        apply to its workers.
    """

    url: str
    is_router: bool
    update_error: str = ""


class ModelInfo(NamedTuple):
    """The model that a server reports.

    Attributes:
      path: Path or name of the model.
      tokenizer_path: Path or name of the tokenizer.
      weight_version: Name of the current weights. Empty if the server does not report one.
      has_weights: Whether the server has weights. False if it sleeps, or has not loaded weights since it was woken.
    """

    path: str
    tokenizer_path: str
    weight_version: str
    has_weights: bool = True

    @property
    def weights(self) -> str:
        """Path and version. Servers that were started with different models may report the same version."""
        return f"{self.path} {self.weight_version}".strip()


class WeightSpan(NamedTuple):
    """Consecutive tokens of a completion that were generated with the same weights.

    Attributes:
      start: Index of the first token.
      end: Index after the last token.
      version: Name of the weights. Empty if the server does not report one.
    """

    start: int
    end: int
    version: str


class ServerCompletion(NamedTuple):
    """A completion of T tokens that a server returned.

    Attributes:
      token_ids: Generated tokens [T], including the stop token.
      logprobs: Log-probabilities [T] of these tokens.
      finish_reason: Reason why the generation ended. None if it was aborted.
      weights: Weights that generated the tokens, in order. Empty if it was aborted before the first token.
      cached_tokens: Number of prompt tokens that were read from the prefix cache. None if the server omits it.
    """

    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    finish_reason: FinishReason | None
    weights: Sequence[WeightSpan]
    cached_tokens: int | None = None

    @property
    def weight_version(self) -> str | None:
        """Name of the weights that generated the last token. None if there are no tokens."""
        return self.weights[-1].version if self.weights else None

    def weight_flaw(self, accepted: Collection[str]) -> str:
        """Returns an empty string if each token was generated with accepted weights, otherwise the reason why not.

        Args:
          accepted: Names of the accepted weights.
        """
        names = dict.fromkeys(span.version for span in self.weights)
        if not names.keys() <= set(accepted):
            return f"the tokens were generated with weights {' and '.join(names)} instead of {' or '.join(accepted)}"
        bounds = [0, *(bound for span in self.weights for bound in span[:2]), len(self.token_ids)]
        if bounds[::2] != bounds[1::2] or bounds != sorted(bounds):
            return f"its weight versions cover the tokens {bounds[1:-1]}, but it has {bounds[-1]} tokens"
        return ""


def check_accepted(response: httpx.Response, url: str, request: Request) -> None:
    """Verifies that a server has accepted a prompt. Statuses after which a prompt is sent again are accepted.

    Args:
      response: Response to a generation request.
      url: URL of the server or router.
      request: The request.

    Raises:
      RequestError: If the status is 4xx, except for 408 (timeout) and 429 (too many requests).
    """
    if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
        raise RequestError(
            f"{url} rejected the prompt of problem {request.problem_id!r} with {response.status_code}: "
            f"{quote(response.text)}"
        )


@runtime_checkable
class Dialect(Protocol):
    """Requests to one kind of server. Implementations inherit this class and its documentation.

    If the server does not respond or its response is invalid, `wait_for`, `probe` and `workers` raise `ServerError`,
    and the other methods raise `httpx.HTTPError`. If the server responds to a request of `pause`, `load_folder`,
    `resume`, `rename_weights` or `sleep` with an error, these methods raise `ServerError`.

    Attributes:
      max_cache_block: Maximum number of tokens of a block of the prefix cache. Other prompts only share whole blocks.
    """

    max_cache_block: int

    async def wait_for(self, url: str, seconds: float) -> None:
        """Waits until the server or router at `url` responds. A router responds once it has a worker.

        Args:
          url: URL of the server or router.
          seconds: Timeout in seconds.

        Raises:
          ServerError: If it does not respond within `seconds`.
        """
        ...

    async def probe(self, url: str) -> Endpoint:
        """Determines the kind of server at `url`.

        Raises:
          ServerError: If the kind of server cannot be determined.
        """
        ...

    async def workers(self, url: str, seconds: float) -> list[str]:
        """Waits until a router responds, and returns the URLs of its workers.

        Dialects without routers inherit this method, which returns no workers.

        Args:
          url: URL of the router.
          seconds: Timeout in seconds.

        Raises:
          ServerError: If the router does not respond within `seconds`, or its list of workers is invalid.
        """
        return []

    async def model_info(self, url: str) -> ModelInfo:
        """Returns the model that a server reports."""
        ...

    async def generate(
        self,
        client: httpx.AsyncClient,
        url: str,
        request: Request,
        indices: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> Sequence[ServerCompletion | InvalidResponseError]:
        """Generates one completion for each of the selected seeds of a request.

        Args:
          client: Client for the HTTP requests.
          url: URL of the server or router.
          request: Prompt, seeds and token limit.
          indices: Indices of the seeds. Routers are given one seed per call.
          sampling: Sampling parameters.
          stop_ids: Token ids that end a generation.

        Returns:
          One item per index: a completion, or the reason why it is invalid.

        Raises:
          RequestError: If the server rejects the request permanently, so that a retry is useless.
        """
        ...

    async def pause(self, client: httpx.AsyncClient, url: str, keep: bool = False) -> None:
        """Wakes a server if it sleeps and pauses it, so that it can load weights.

        Args:
          client: Client for the HTTP requests.
          url: URL of the server.
          keep: Whether the generations in progress continue with the new weights after `resume`, instead of being
            aborted. `load_folder` discards their keys and values, so that they are computed with the new weights.
        """
        ...

    async def load_folder(self, client: httpx.AsyncClient, url: str, folder: Path, version: str) -> None:
        """Loads weights from disk into a paused server, and flushes its caches.

        Args:
          client: Client for the HTTP requests.
          url: URL of the server.
          folder: Hugging Face folder with the weights.
          version: Name of the weights, which the server reports after the call.
        """
        ...

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        """Resumes a paused server."""
        ...

    async def checksums(
        self, client: httpx.AsyncClient, url: str, skipped_layers: Sequence[int]
    ) -> Sequence[Mapping[str, str]] | None:
        """Computes checksums of the weights.

        Args:
          client: Client for the HTTP request.
          url: URL of the server.
          skipped_layers: Layers whose checksums are not used.

        Returns:
          Checksums keyed by tensor name, for each rank of a tensor-parallel server. Empty if the server has none. None
          if it quantizes the weights that it loads.
        """
        ...

    async def rename_weights(self, client: httpx.AsyncClient, url: str, version: str) -> None:
        """Sets the weight version that the server reports.

        Args:
          client: Client for the HTTP request.
          url: URL of the server.
          version: Name of the weights, whose values do not change.
        """
        ...

    async def sleep(self, client: httpx.AsyncClient, url: str) -> None:
        """Aborts the generations of a server, and makes it free the memory of its weights and caches.

        Servers that are already asleep are skipped. `pause` wakes the server.

        Args:
          client: Client for the HTTP requests.
          url: URL of the server.

        Raises:
          ServerError: If the server fails to free its memory, or does not support this.
        """
        ...
