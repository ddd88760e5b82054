"""Starts and stops real vLLM servers on CPU, and shares two of them between all test files of a session."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import TINY, tiny_params
from flax import nnx
from sglang_servers import ROOT, SGLangServer, running

from poly_epo_jax.model import hf
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.tasks import PolynomialTask

VLLM = ROOT / "third_party" / "vllm"
ALPHABET = PolynomialTask.alphabet
TOKENIZER = build_character_tokenizer(ALPHABET)
# vLLM requires a head_dim of at least 32. On CPU, it does not update the output head of a model with tied embeddings.
UNTIED = dataclasses.replace(TINY, vocab_size=len(TOKENIZER), head_dim=32, tie_word_embeddings=False)
UNTIED_MODEL = nnx.eval_shape(lambda: Transformer(UNTIED, nnx.Rngs(0)))
CONTEXT = 512


def require_vllm() -> None:
    """Skips the test if the vLLM environment is not installed, or fails it if POLY_EPO_REQUIRE_VLLM is set."""
    if any((VLLM / "env-cpu").glob("installed-*")):
        return
    reason = "vLLM's CPU environment is not installed: bash third_party/vllm/setup.sh cpu"
    if os.environ.get("POLY_EPO_REQUIRE_VLLM"):
        pytest.fail(reason)
    pytest.skip(reason)


class VLLMServer(SGLangServer):
    """A server of the model in a folder.

    Args:
      model: Folder of the model.
      log: File to which the output of the server is appended.
      *flags: Additional flags of `vllm serve`.
    """

    def __init__(self, model: Path, log: Path, *flags: str):
        super().__init__(model, log)
        self.model = model
        self._command = ["bash", str(VLLM / "serve.sh"), "cpu", str(model), str(self.port), *flags]
        self._variables = {"OMP_NUM_THREADS": "1"}

    def requests(self) -> list[str]:
        """Returns the paths of all successful POST requests in order, including those before a restart."""
        return re.findall(r'"POST /([\w/]+)\S* HTTP/1.1" 200', self._log.read_text())


@contextlib.contextmanager
def vllm_servers(folder: Path) -> Iterator[list[VLLMServer]]:
    """Starts two servers of UNTIED with random weights.

    Args:
      folder: New folder for the model and the logs.
    """
    require_vllm()
    model = folder / "model"
    params = tiny_params(9, UNTIED_MODEL)
    hf.save_pretrained(model, params, UNTIED, dtype="float32", eos_token_id=1, tokenizer=TOKENIZER)
    flags = ("--max-model-len", str(CONTEXT), "--max-num-seqs", "64")
    with running([VLLMServer(model, folder / f"server-{i}.log", *flags) for i in range(2)]) as servers:
        yield servers
