"""The trainer's side of the content checks: bytes of the pushed tensors, and log-probabilities of the probe."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt8

from poly_epo_jax.model import hf
from poly_epo_jax.model.architectures import ARCHITECTURES
from poly_epo_jax.model.logprobs import token_logprobs
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.parallel.compiler_options import compiler_options
from poly_epo_jax.parallel.mesh import row_shards
from poly_epo_jax.parallel.sharding import replicated, row_sharding
from poly_epo_jax.types import Params

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Projections that vLLM and SGLang store as one tensor, with the rows of the parts in this order. Both also stack the
experts of a layer, in `w13_weight` (gate and up) and `w2_weight` (down)."""
VOCAB_MULTIPLE = 64
"""vLLM and SGLang pad embedding and head with rows of zeros to a multiple of this number of rows."""
SAMPLED_ENTRIES = 4096
"""Maximum number of entries per tensor that are compared between two pushes."""
ROW_STEP = 64
"""The length of the probe's row is a multiple of this number of tokens, which all attention kernels support."""


class PushedWeights(NamedTuple):
    """The content of one push, for the tensors in `WeightReference.tensors`.

    Attributes:
      digests: SHA-256 of the bytes of each tensor in hexadecimal digits, keyed by the name of the servers.
      entries: Bytes of sampled entries [E, B] of all tensors, with B bytes per entry.
    """

    digests: Mapping[str, str]
    entries: UInt8[np.ndarray, "E B"]


class WeightReference:
    """Computes the values that servers with the pushed weights must return.

    All computations use the devices of this process, because only processes that push weights verify servers.

    Args:
      model: The policy. It may be abstract.
      mesh: Mesh of this process.
      dtype: Data type of the pushed tensors.

    Attributes:
      tensors: Hugging Face names of the tensors that are compared, keyed by the name of the servers: all tensors of the
        first and the last layer, embedding, final norm and head.
      middle_layers: Numbers of the layers whose tensors are not compared.
      dtype: The least precise dtype of the matmuls of trainer and servers.
    """

    def __init__(self, model: Transformer, mesh: Mesh, dtype: str):
        self._config, self._mesh, self._pushed_dtype = model.config, mesh, dtype
        self.tensors = compared_tensors(hf.tensor_names(model.config), model.config.num_layers)
        self._padded = {ARCHITECTURES[model.config.family].weights[path].name for path in ("embed", "untied_head")}
        self.middle_layers = range(1, model.config.num_layers - 1)
        # Accelerators compute float32 matmuls in a shorter type by default.
        dtypes = [model.config.dtype, dtype] if mesh.devices.flat[0].platform == "cpu" else ["bfloat16"]
        self.dtype = max(dtypes, key=lambda name: float(jax.numpy.finfo(name).eps))
        model_def = nnx.split(model)[0]

        def forward(params: Params, tokens, positions, segment_ids, targets, wanted):
            policy = nnx.merge(model_def, params)
            return token_logprobs(policy(tokens, positions, segment_ids), policy.head, targets, wanted)[0]

        self._forward = jax.jit(forward, compiler_options=compiler_options(mesh), out_shardings=replicated(mesh))

    def describe(self, params: Params) -> PushedWeights:
        """Returns the content of a push.

        Args:
          params: All weights of the policy.
        """
        digests, entries = {}, []
        for name, parts in self.tensors.items():
            digest = hashlib.sha256()
            for part, array in hf.exported_tensors(params, self._config, self._pushed_dtype, parts):
                host = np.ascontiguousarray(array)
                words = host.reshape(-1, 1).view(np.uint8)
                digest.update(words.data)
                if part in self._padded:
                    digest.update(bytes(-len(host) % VOCAB_MULTIPLE * host[0].nbytes))
                entries.append(words[:: max(1, len(words) // SAMPLED_ENTRIES)])
            digests[name] = digest.hexdigest()
        return PushedWeights(digests, np.concatenate(entries))

    def logprobs(
        self, params: Params, prompt_ids: Int[np.ndarray, " L"], token_ids: Int[np.ndarray, " T"]
    ) -> Float[np.ndarray, " T"]:
        """Computes log-probabilities with the trainer's forward pass, at temperature 1.

        Args:
          params: All weights of the policy.
          prompt_ids: Prompt.
          token_ids: Tokens after the prompt.

        Returns:
          Log-probabilities of `token_ids` in nats, float32.
        """
        # All rows of the mesh are copies of the same row.
        num_rows = row_shards(self._mesh.shape)
        sequence = np.concatenate([prompt_ids, token_ids]).astype(np.int32)
        step = math.lcm(ROW_STEP, self._mesh.shape["tensor"])
        size, length = len(sequence), -(-len(sequence) // step) * step
        tokens, segment_ids, targets = (np.zeros((num_rows, length), np.int32) for _ in range(3))
        wanted = np.zeros((num_rows, length), bool)
        tokens[:, :size], segment_ids[:, :size], targets[:, : size - 1] = sequence, 1, sequence[1:]
        wanted[:, len(prompt_ids) - 1 : size - 1] = True
        positions = np.where(segment_ids > 0, np.arange(length, dtype=np.int32), 0)
        with jax.set_mesh(self._mesh):
            rows = jax.device_put((tokens, positions, segment_ids, targets, wanted), row_sharding(self._mesh))
            return np.asarray(self._forward(params, *rows))[0, wanted[0]]


def compared_tensors(names: Sequence[str], num_layers: int) -> dict[str, list[str]]:
    """Selects the tensors of the first and the last layer and those outside of the layers.

    Args:
      names: Hugging Face names of all tensors.
      num_layers: Number of layers.

    Returns:
      The selected names, keyed by the name under which servers store the tensor. Fused tensors have several parts.
    """
    order = [part for parts in FUSED.values() for part in parts]
    chosen: dict[str, list[str]] = {}

    def place(name: str) -> tuple[int, int]:
        expert = re.search(r"\.experts\.(\d+)\.", name)
        return int(expert[1]) if expert else -1, next((i for i, part in enumerate(order) if f".{part}." in name), 0)

    for name in sorted(names, key=place):
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) in (0, num_layers - 1):
            chosen.setdefault(_server_name(name), []).append(name)
    return chosen


def _server_name(name: str) -> str:
    if ".experts." in name:
        stack = "w2_weight" if ".down_proj." in name else "w13_weight"
        return re.sub(r"\.experts\.\d+\..*", f".experts.{stack}", name)
    for fused, parts in FUSED.items():
        for part in parts:
            name = name.replace(f".{part}.", f".{fused}.")
    return name
