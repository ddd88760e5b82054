"""The judge that reads spelling alone: it needs no server and no model, and it knows nothing of strategies."""

import asyncio
import zlib

import numpy as np
from jaxtyping import Bool, Float, Int

from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.types import Clustering, Group

ROUNDING = 1e-5  # of cosines of float32 vectors: equal texts are alike at a threshold of 1, too


class NgramsJudge:
    """Embeds responses by the pieces of text that they hold, and clusters those whose embeddings are near.

    A response's pieces are all its runs of `length` characters. Each has a place among `dimensions`, by its CRC-32; the
    embedding counts the pieces at each place, divided by its norm. Two responses share a cluster where the cosine of
    their embeddings is at least `threshold`, or where a chain of others connects them so. At 1 that is where they hold
    the same pieces equally often, up to pieces that share a place. An empty response is degenerate, its embedding 0.
    """

    def __init__(self, length: int, dimensions: int, threshold: float):
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
        data = text.encode("utf-32-le", errors="surrogatepass")  # four bytes for every character
        size = 4 * self._length
        pieces = [data[i : i + size] for i in range(0, max(len(data) - size, 0) + 1, 4)] if text else []
        places = np.array([zlib.crc32(piece) % self._dimensions for piece in pieces], int)
        counts = np.bincount(places, minlength=self._dimensions).astype(np.float32)
        return counts / max(float(np.linalg.norm(counts)), 1.0)


def first_connected(is_near: Bool[np.ndarray, "N N"]) -> Int[np.ndarray, " N"]:
    """For each the first that a chain of near ones connects it with; itself at the latest."""
    connected = is_near | np.eye(len(is_near), dtype=bool)
    while not np.array_equal(wider := connected @ connected, connected):
        connected = wider
    return connected.argmax(axis=1)
