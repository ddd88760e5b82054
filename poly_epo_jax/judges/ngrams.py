"""Judge that clusters responses by shared character n-grams. It does not require a server or a model."""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from jaxtyping import Bool, Float, Int

from poly_epo_jax.config.keys import JudgeKeys
from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.registry import Range
from poly_epo_jax.types import Clustering, Group, Task

ROUNDING = 1e-5  # rounding error of float32 cosines, so that equal texts also match at a threshold of 1


class NgramsJudge:
    """Embeds responses by their character n-grams, and clusters responses with similar embeddings.

    The CRC-32 of an n-gram maps it to a dimension. The embedding counts the n-grams per dimension, and is normalized to
    length 1. Two responses share a cluster if the cosine of their embeddings is at least `threshold`, or if a chain of
    such pairs connects them. At a threshold of 1, they share a cluster if they contain the same n-grams in the same
    proportions, except for collisions of n-grams in a dimension. An empty response is degenerate, and its embedding is
    0.

    Args:
      task: Task of the run. Not used.
      section: Section `judge` of the configuration. Not used.
      length: Number of characters in an n-gram.
      dimensions: Number D of dimensions of the embeddings.
      threshold: Minimum cosine of two responses in a cluster.
    """

    def __init__(
        self,
        task: Task,
        section: JudgeKeys,
        *,
        length: Annotated[int, Range(1, 16)] = 3,
        dimensions: Annotated[int, Range(2, 65536)] = 256,
        threshold: Annotated[float, Range(0, 1)] = 1.0,
    ):
        self._length, self._dimensions, self._threshold = length, dimensions, threshold

    async def cluster(self, group: Group) -> Clustering:
        """Returns the clusters, with the feature `embeddings` of shape [N, dimensions]."""
        texts = [generation.text for generation in group.generations]
        return await asyncio.to_thread(
            lambda: cluster_similar(texts, np.stack([self._embedded(text) for text in texts]), self._threshold)
        )

    def _embedded(self, text: str) -> Float[np.ndarray, " D"]:
        data = text.encode("utf-32-le", errors="surrogatepass")  # four bytes per character
        size = 4 * self._length
        ngrams = [data[i : i + size] for i in range(0, max(len(data) - size, 0) + 1, 4)] if text else []
        counts = np.bincount(
            np.array([zlib.crc32(ngram) % self._dimensions for ngram in ngrams], int), minlength=self._dimensions
        ).astype(np.float32)
        return counts / max(float(np.linalg.norm(counts)), 1.0)


def cluster_similar(texts: Sequence[str], embeddings: Float[np.ndarray, "N D"], threshold: float) -> Clustering:
    """Clusters texts whose embeddings are similar, directly or through a chain of similar pairs.

    Args:
      texts: The texts of N responses. Empty texts are degenerate.
      embeddings: Their embeddings, with rows of length 1. Rows of empty texts are arbitrary.
      threshold: Minimum cosine of two similar texts.

    Returns:
      The clusters, with the embeddings as the feature `embeddings`.
    """
    is_text = np.array([bool(text) for text in texts])
    is_near = (embeddings @ embeddings.T >= threshold - ROUNDING) & is_text & is_text[:, None]
    keys = [root if text else None for root, text in zip(component_roots(is_near).tolist(), texts, strict=True)]
    return Clustering(clusters_of(keys).ids, features={"embeddings": embeddings})


def component_roots(is_near: Bool[np.ndarray, "N N"]) -> Int[np.ndarray, " N"]:
    """Returns, for each index, the smallest index in its connected component of the graph of near pairs.

    Args:
      is_near: Symmetric adjacency matrix of the graph.
    """
    connected = is_near | np.eye(len(is_near), dtype=bool)
    while not np.array_equal(wider := connected @ connected, connected):
        connected = wider
    return connected.argmax(axis=1)
