"""Two ways to load a policy's weights into SGLang servers: from a folder on disk, or as tensors."""

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

BUCKET_BYTES = 10**9
METADATA_MODULE = "sglang.srt.weight_sync.tensor_bucket"


@runtime_checkable
class WeightSync(Protocol):
    """Holds the current weights in the form that servers load, so that a server that comes back can load them again."""

    def prepare(self, params: Params, version: str) -> None:
        """Prepares weights named `version`; meanwhile, servers may generate from the current ones, and come back."""
        ...

    def switch(self) -> None:
        """From now on, `push` loads the prepared weights."""
        ...

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        """Loads the current weights into the paused servers and flushes their caches.

        Raises:
          ServerError: a server did not accept them.
          httpx.HTTPError: the connection to a server failed.
        """
        ...

    def close(self) -> None:
        """Frees whatever is held."""
        ...


class DiskSync:
    """Writes a Hugging Face folder that every server reads: under /dev/shm on one host, on a shared disk for several.

    Args:
      folder: versions are written below it, in a new folder that only this user can enter, although everyone may write
        to /dev/shm. Servers of other users, apart from root, cannot read it.
      run: names the folder, so that the next process of a run that was killed removes what that left behind.
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
        """Writes all of `version`, alongside the current one.

        Raises:
          OSError: it cannot be written.
        """
        if self._folder == Path():
            self._folder = _private_folder(self._parent, self._prefix)
        try:
            hf.save_pretrained(self._folder / version, params, self._config, dtype=self._dtype)
        except OSError as error:
            raise OSError(
                f"The weights cannot be written to {self._folder} ({error}); make room there, or set "
                "rollouts.weights_dir to a folder with room for two versions."
            ) from error
        self._prepared = version

    def switch(self) -> None:
        self._outdated += [self._version] if self._version else []
        self._version = self._prepared

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        body = {"model_path": str(self._folder / self._version), "weight_version": self._version, "flush_cache": True}
        await asyncio.gather(*(post(client, url, "update_weights_from_disk", body) for url in urls))
        while self._outdated:  # only now: a server that had just come back may have been reading it
            await asyncio.to_thread(shutil.rmtree, self._folder / self._outdated.pop())

    def close(self) -> None:
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = Path()


def _private_folder(parent: Path, prefix: str) -> Path:
    """A new folder that only this user can enter, and that nobody can have made before.

    Raises:
      OSError: it cannot be made, or everyone could put another folder in its place.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if parent.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise PermissionError(0, f"everyone may replace folders there; chmod +t {parent}")
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise OSError(
            f"No folder for weights can be made in {parent} ({error.strerror}); set rollouts.weights_dir to another."
        ) from error


class TensorSync:
    """Sends flattened buckets of tensors: handles to CUDA memory if the weights are on a GPU, otherwise the bytes.

    A handle works for servers on this host that see the trainer's first GPU under the same number; servers must not be
    data parallel. Only one copy of the weights is held, as the device may not have room for two; so `switch` does all
    the work.

    Args:
      tensor_parallel: the number of ranks of each server, which all get the same payload.

    Raises:
      ImportError: torch is not installed.
    """

    def __init__(self, config: ModelConfig, dtype: str, tensor_parallel: int):
        try:
            import torch  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ImportError(
                "rollouts.weight_sync=tensor needs torch, which no extra brings, as its versions pin CUDA's "
                "libraries; pip install torch, or choose disk."
            ) from None
        self._torch: Any = torch
        self._config, self._dtype, self._ranks = config, dtype, tensor_parallel
        self._metadata = _metadata_class()
        self._version = ""
        self._prepared: tuple[Params, str] = {}, ""
        self._buckets: list[Any] = []  # kept for as long as a server may still open the handles to them

    def prepare(self, params: Params, version: str) -> None:
        self._prepared = params, version

    def switch(self) -> None:
        self._buckets = []
        (params, self._version), self._prepared = self._prepared, ({}, "")
        self._buckets = list(self._make_buckets(params))

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        # A trainer that died may have left its update open; if none did, the server just says so.
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
        # Concatenating also copies: a handle can only be made of memory that torch owns, not of JAX's.
        bucket = self._torch.cat(parts)
        if bucket.is_cuda:
            # The copy has only been queued. JAX, which knows nothing of torch's queue, reclaims its memory as soon as
            # the tensors that refer to it are gone.
            self._torch.cuda.synchronize(bucket.device)
        return {"flattened_tensor": bucket, "metadata": metadata}

    def _pickle(self, bucket: dict[str, Any]) -> bytes:
        if not bucket["flattened_tensor"].is_cuda:
            return pickle.dumps(bucket)
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(bucket)
        return buffer.getvalue()


def _metadata_class() -> type:
    """The class that describes a tensor in a bucket, under the name by which SGLang unpickles its own class."""

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
