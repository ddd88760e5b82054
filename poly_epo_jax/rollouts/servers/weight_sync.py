"""Stores the current weights of the policy for servers: the protocol `WeightSync`, and a folder on disk."""

import asyncio
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import httpx

from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.rollouts.servers.dialect import Dialect
from poly_epo_jax.types import Params


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

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str], dialect: Dialect) -> None:
        """Loads the current weights into paused servers, and flushes their caches.

        Args:
          client: Client for the HTTP requests.
          urls: URLs of the servers.
          dialect: API of the servers.

        Raises:
          ServerError: If a server does not accept the weights.
          httpx.HTTPError: If the connection to a server fails.
        """
        ...

    def close(self) -> None:
        """Frees the stored weights."""
        ...


class DiskSync(WeightSync):
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

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str], dialect: Dialect) -> None:
        """Makes the servers load the current folder, and removes older versions."""
        folder, version = self._folder / self._version, self._version
        await asyncio.gather(*(dialect.load_folder(client, url, folder, version) for url in urls))
        while self._outdated:  # Removed only now, because a restarted server may still have been reading it.
            await asyncio.to_thread(shutil.rmtree, self._folder / self._outdated.pop())

    def close(self) -> None:
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
