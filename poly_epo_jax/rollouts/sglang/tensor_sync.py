"""Sends weights to SGLang servers as tensors."""

import asyncio
import base64
import dataclasses
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import httpx

from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.rollouts.servers.dialect import Dialect
from poly_epo_jax.rollouts.servers.weight_sync import WeightSync
from poly_epo_jax.rollouts.sglang.dialect import post
from poly_epo_jax.types import Params

BUCKET_BYTES = 10**9  # Maximum size of a bucket, unless a single tensor is larger.
METADATA_MODULE = "sglang.srt.weight_sync.tensor_bucket"


class TensorSync(WeightSync):
    """Sends weights as flattened buckets of tensors: CUDA memory handles for weights on a GPU, otherwise raw bytes.

    CUDA handles require servers on this host that see the trainer's first GPU under the same index. Data-parallel
    servers are not supported. Only one copy of the buckets is kept, because the device may not have enough memory for
    two. The buckets are therefore created by `switch` instead of `prepare`.

    Args:
      config: Configuration of the model.
      dtype: Data type of the weights that are sent.
      tensor_parallel: Number of tensor-parallel ranks of each server. All ranks receive the same payload.

    Raises:
      ImportError: If torch is not installed.
    """

    def __init__(self, config: ModelConfig, dtype: str, tensor_parallel: int):
        try:
            import torch  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ImportError(
                "rollouts.weight_sync=tensor requires torch, which no extra installs because its releases pin CUDA "
                "libraries; run pip install torch, or set rollouts.weight_sync=disk."
            ) from None
        self._torch: Any = torch
        self._config, self._dtype, self._ranks = config, dtype, tensor_parallel
        self._metadata = _metadata_class()
        self._version = ""
        self._prepared: tuple[Params, str] = {}, ""
        self._buckets: list[Any] = []  # Kept alive because servers may still open handles to their memory.

    def prepare(self, params: Params, version: str) -> None:
        """Stores references to the weights, which must not be donated until `switch` is called."""
        self._prepared = params, version

    def switch(self) -> None:
        """Replaces the buckets of the current weights by buckets of the prepared weights."""
        self._buckets = []
        (params, self._version), self._prepared = self._prepared, ({}, "")
        self._buckets = list(self._make_buckets(params))

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str], dialect: Dialect) -> None:
        """Sends all buckets to the servers, which must be SGLang servers, within one weight update per server."""
        # Closes an update that a killed trainer left open. Without an open update, the server only returns an error.
        await asyncio.gather(*(client.post(f"{url}/end_weight_update", json={}) for url in urls))
        await asyncio.gather(*(post(client, url, "begin_weight_update", {"selector": "all"}) for url in urls))
        try:
            for number, bucket in enumerate(self._buckets, start=1):
                is_last = number == len(self._buckets)
                dumps = ForkingPickler.dumps if bucket["flattened_tensor"].is_cuda else pickle.dumps
                body = {
                    "serialized_named_tensors": [base64.b64encode(dumps(bucket)).decode()] * self._ranks,
                    "load_format": "flattened_bucket",
                    "flush_cache": is_last,
                } | ({"weight_version": self._version} if is_last else {})
                await asyncio.gather(*(post(client, url, "update_weights_from_tensor", body) for url in urls))
        finally:
            await asyncio.gather(*(post(client, url, "end_weight_update", {}) for url in urls))

    def close(self) -> None:
        self._buckets = []

    def _make_buckets(self, params: Params) -> Iterator[dict[str, Any]]:
        tensors, size = [], 0
        for name, array in hf.exported_tensors(params, self._config, self._dtype):
            tensor = self._torch.from_dlpack(array)
            if tensors and size + tensor.nbytes > BUCKET_BYTES:
                yield self._flatten(tensors)
                tensors, size = [], 0
            tensors.append((name, tensor))
            size += tensor.nbytes
        yield self._flatten(tensors)

    def _flatten(self, tensors: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        metadata, parts, start = [], [], 0
        for name, tensor in tensors:
            flat = tensor.contiguous().flatten().view(self._torch.uint8)
            end = start + flat.numel()
            metadata.append(self._metadata(name, tensor.shape, tensor.dtype, start, end, flat.numel()))
            parts.append(flat)
            start = end
        # Concatenation copies the tensors to memory of torch, because handles to memory of JAX cannot be created.
        bucket = self._torch.cat(parts)
        if bucket.is_cuda:
            # The copy is asynchronous. JAX does not track work that torch has queued, and reuses the source memory as
            # soon as the tensors that refer to it are deleted.
            self._torch.cuda.synchronize(bucket.device)
        return {"flattened_tensor": bucket, "metadata": metadata}


def _metadata_class() -> type:
    """Returns a class with the module and name of SGLang's tensor metadata class, so that SGLang can unpickle it."""
    metadata = dataclasses.make_dataclass(
        "FlattenedTensorMetadata", ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
    )
    metadata.__module__ = METADATA_MODULE
    parts = METADATA_MODULE.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        sys.modules.setdefault(name, types.ModuleType(name))
    setattr(sys.modules[METADATA_MODULE], metadata.__name__, metadata)
    return metadata
