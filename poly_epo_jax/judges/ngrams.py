"""The judge that compares only spelling: it needs no server and no model, and knows nothing about strategies."""

import asyncio
import zlib
from typing import Annotated

import numpy as np
from jaxtyping import Bool, Float, Int

from poly_epo_jax.config.checks import Range
from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.types import Clustering, Group, Task

ROUNDING = 1e-5  # of cosines of float32 vectors, so that equal texts match at a threshold of 1, too


class NgramsJudge:
    """Embeds responses by the pieces of text that they contain, and clusters those with similar embeddings.

    A response's pieces are all its runs of `length` characters. The CRC-32 of a piece assigns it one of `dimensions`;
    the embedding counts the pieces in each dimension, and is divided by its norm. Two responses share a cluster if the
    cosine of their embeddings is at least `threshold`, or if a chain of such pairs connects them. At a threshold of 1,
    they share one if they contain the same pieces equally often, up to pieces that share a dimension. An empty response
    is degenerate, and its embedding is 0.
    """

    def __init__(
        self,
        task: Task,
        section: JudgeSection,
        *,
        length: Annotated[int, Range(1, 16)] = 3,
        dimensions: Annotated[int, Range(2, 65536)] = 256,
        threshold: Annotated[float, Range(0, 1)] = 1.0,
    ):
        self._length, self._dimensions, self._threshold = length, dimensions, threshold

    async def cluster(self, group: Group) -> Clustering:
        """Adds the feature `embeddings` [N, dimensions]."""
        return await asyncio.to_thread(self._clustered, [generation.text for generation in group.generations])

    def _clustered(self, texts: list[str]) -> Clustering:
        embeddings = np.stack([self._embedded(text) for text in texts])
        firsts = first_connected(embeddings @ embeddings.T >= self._threshold - ROUNDING)
        keys = [first if text else None for first, text in zip(firsts.tolist(), texts, strict=True)]
        return Clustering(clusters_of(keys).ids, features={"embeddings": embeddings})

    def _embedded(self, text: str) -> Float[np.ndarray, " D"]:
        data = text.encode("utf-32-le", errors="surrogatepass")  # four bytes per character
        size = 4 * self._length
        pieces = [data[i : i + size] for i in range(0, max(len(data) - size, 0) + 1, 4)] if text else []
        places = np.array([zlib.crc32(piece) % self._dimensions for piece in pieces], int)
        counts = np.bincount(places, minlength=self._dimensions).astype(np.float32)
        return counts / max(float(np.linalg.norm(counts)), 1.0)


def first_connected(is_near: Bool[np.ndarray, "N N"]) -> Int[np.ndarray, " N"]:
    """For each index, the first one that a chain of near pairs connects it to; at the latest, itself."""
    connected = is_near | np.eye(len(is_near), dtype=bool)
    while not np.array_equal(wider := connected @ connected, connected):
        connected = wider
    return connected.argmax(axis=1)
