"""Loads weights into SGLang servers, either from a folder on disk or as tensors."""

import asyncio
import base64
import dataclasses
import hashlib
import io
import os
import pickle
import shutil
import stat
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import httpx

from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.rollouts.sglang import post
from poly_epo_jax.types import Params

BUCKET_BYTES = 10**9  # Maximum size of a bucket, unless a single tensor is larger.
METADATA_MODULE = "sglang.srt.weight_sync.tensor_bucket"


@runtime_checkable
class WeightSync(Protocol):
    """Stores the current weights in a form that servers can load, also when they restart."""

    def prepare(self, params: Params, version: str) -> None:
        """Prepares new weights. Until `switch` is called, servers may generate with the current ones and reload them.

        Args:
          params: All weights of the policy.
          version: Name of the weights.

        Raises:
          OSError: If the weights cannot be written.
        """
        ...

    def switch(self) -> None:
        """Makes the prepared weights the current ones, which `push` loads."""
        ...

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        """Loads the current weights into paused servers, and flushes their caches.

        Args:
          client: Client for the HTTP requests.
          urls: URLs of the servers.

        Raises:
          ServerError: If a server does not accept the weights.
          httpx.HTTPError: If the connection to a server fails.
        """
        ...

    def close(self) -> None:
        """Frees the stored weights."""
        ...


class DiskSync:
    """Writes weights to a Hugging Face folder that every server reads.

    Args:
      folder: Parent directory: /dev/shm if the servers run on this host, otherwise a shared disk. Weights are written
        to a new subfolder that only this user can access, because other users may write to /dev/shm. The servers must
        run as the same user or as root.
      run: Name of the run, from which the name of the subfolder is derived. Subfolders that a killed process of the
        same run left behind are removed.
      config: Configuration of the model.
      dtype: Data type of the written weights.
    """

    def __init__(self, folder: Path, run: str, config: ModelConfig, dtype: str):
        self._parent, self._folder = folder.absolute(), Path()
        self._prefix = f"poly_epo_jax-{hashlib.sha256(f'{os.geteuid()} {run}'.encode()).hexdigest()[:16]}-"
        for left in self._parent.glob(f"{self._prefix}*"):
            if not left.is_symlink() and left.is_dir() and left.stat().st_uid == os.geteuid():
                shutil.rmtree(left)
        self._config, self._dtype = config, dtype
        self._version = self._prepared = ""
        self._outdated: list[str] = []

    def prepare(self, params: Params, version: str) -> None:
        """Writes new weights to the folder, next to the current ones.

        Args:
          params: All weights of the policy.
          version: Name of the weights.

        Raises:
          OSError: If the weights cannot be written.
        """
        if self._folder == Path():
            self._folder = _private_folder(self._parent, self._prefix)
        try:
            hf.save_pretrained(self._folder / version, params, self._config, dtype=self._dtype)
        except OSError as error:
            raise OSError(
                f"Failed to write weights to {self._folder}: {error}. Free disk space, or set rollouts.weights_dir to "
                "a folder with space for two copies of the weights."
            ) from error
        self._prepared = version

    def switch(self) -> None:
        """Makes the prepared version the current one. The previous one is removed by the next `push`."""
        self._outdated += [self._version] if self._version else []
        self._version = self._prepared

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        """Makes the servers load the current folder, and removes older versions."""
        body = {"model_path": str(self._folder / self._version), "weight_version": self._version, "flush_cache": True}
        await asyncio.gather(*(post(client, url, "update_weights_from_disk", body) for url in urls))
        while self._outdated:  # Removed only now, because a restarted server may still have been reading it.
            await asyncio.to_thread(shutil.rmtree, self._folder / self._outdated.pop())

    def close(self) -> None:
        """Removes the folder."""
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = Path()


def _private_folder(parent: Path, prefix: str) -> Path:
    """Creates a new folder that only this user can access.

    Raises:
      OSError: If the folder cannot be created, or if other users could replace it.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if parent.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise PermissionError(0, f"other users can replace folders in it; run chmod +t {parent}")
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise OSError(
            f"Failed to create a folder for weights in {parent} ({error.strerror}); correct this, or set "
            "rollouts.weights_dir to another folder."
        ) from error


class TensorSync:
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

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        """Sends all buckets to the servers, within one weight update per server."""
        # Closes an update that a killed trainer left open. Without an open update, the server only returns an error.
        await asyncio.gather(*(client.post(f"{url}/end_weight_update", json={}) for url in urls))
        await asyncio.gather(*(post(client, url, "begin_weight_update", {"selector": "all"}) for url in urls))
        try:
            for number, bucket in enumerate(self._buckets, start=1):
                is_last = number == len(self._buckets)
                payload = base64.b64encode(self._pickle(bucket)).decode()
                body = {
                    "serialized_named_tensors": [payload] * self._ranks,
                    "load_format": "flattened_bucket",
                    "flush_cache": is_last,
                } | ({"weight_version": self._version} if is_last else {})
                await asyncio.gather(*(post(client, url, "update_weights_from_tensor", body) for url in urls))
        finally:
            await asyncio.gather(*(post(client, url, "end_weight_update", {}) for url in urls))

    def close(self) -> None:
        """Frees the buckets."""
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

    def _pickle(self, bucket: dict[str, Any]) -> bytes:
        if not bucket["flattened_tensor"].is_cuda:
            return pickle.dumps(bucket)
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(bucket)
        return buffer.getvalue()


def _metadata_class() -> type:
    """Returns a class with the module and name of SGLang's tensor metadata class, so that SGLang can unpickle it."""

    @dataclasses.dataclass
    class FlattenedTensorMetadata:
        name: str
        shape: Any
        dtype: Any
        start_idx: int
        end_idx: int
        numel: int

    FlattenedTensorMetadata.__module__, FlattenedTensorMetadata.__qualname__ = (
        METADATA_MODULE,
        "FlattenedTensorMetadata",
    )
    parts = METADATA_MODULE.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules[METADATA_MODULE].FlattenedTensorMetadata = FlattenedTensorMetadata  # pyright: ignore
    return FlattenedTensorMetadata
