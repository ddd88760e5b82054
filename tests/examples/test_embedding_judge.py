"""Tests of examples/embedding_judge.py, with a fake encoder and with a tiny model that is loaded as documented."""

import asyncio
import json
import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from responses import response

from poly_epo_jax.judges import JUDGES
from poly_epo_jax.rejudge.__main__ import main
from poly_epo_jax.rejudge.results import RESULTS
from poly_epo_jax.types import DEGENERATE_CLUSTER, Group, Problem

FILE = Path(__file__).parents[2] / "examples" / "embedding_judge.py"


@pytest.fixture
def unregistered() -> Iterator[None]:
    """Removes the judge after the test."""
    yield
    JUDGES.pop("embeddings", None)


@pytest.fixture
def example(unregistered: None) -> dict[str, Any]:
    return runpy.run_path(str(FILE))


def directions(texts: list[str]) -> np.ndarray:
    """Returns unit vectors with the angles, in degrees, that the texts state. A text without an angle has 0."""
    angles = np.deg2rad([float(text or 0) for text in texts])
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@pytest.mark.parametrize(
    ("degrees", "ids"),
    [
        (15, [0, 0, 0, 1, DEGENERATE_CLUSTER, DEGENERATE_CLUSTER]),  # 0 and 20 are connected through 10
        (5, [0, 1, 2, 3, DEGENERATE_CLUSTER, DEGENERATE_CLUSTER]),
        (0, [0, 1, 2, 3, DEGENERATE_CLUSTER, DEGENERATE_CLUSTER]),
        (180, [0, 0, 0, 0, DEGENERATE_CLUSTER, DEGENERATE_CLUSTER]),
    ],
)
def test_chains_of_similar_responses_share_a_cluster(example: dict[str, Any], degrees: float, ids: list[int]):
    judge = example["EmbeddingJudge"](directions, float(np.cos(np.deg2rad(degrees))))
    texts = ["0", "10", "20", "120", "", ""]
    found = asyncio.run(judge.cluster(Group(Problem("p", "?", ""), np.zeros(1, np.int32), tuple(map(response, texts)))))
    assert found.ids.tolist() == ids
    assert found.features["embeddings"] == pytest.approx(directions(texts))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a tiny BERT with random weights, whose tokens are words."""
    if not os.environ.get("POLY_EPO_REQUIRE_TORCH"):
        pytest.importorskip("torch", reason="torch is not installed: bash launch/test.sh all installs it for CPUs")
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    BertTokenizer(vocab_file=str(vocabulary)).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_an_embedding_does_not_depend_on_the_other_texts(example: dict[str, Any], encoder: Path):
    encode: Callable = example["load_encoder"](str(encoder))
    texts = ["a b c d e f a b", "a b", "f e d", "a b"]
    together, alone = encode(texts), np.concatenate([encode([text]) for text in texts])
    assert together == pytest.approx(alone, abs=1e-5)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("unregistered")
def test_the_documented_command(encoder: Path, tmp_path: Path):
    row = {
        "problem": "Work out 7 * 24.",
        "answer": "7,24",
        "responses": ["a b", "7*(20+4)", "a b"],
        "rewards": [1, 0, 1],
    }
    (tmp_path / "responses.jsonl").write_text(json.dumps(row))
    flags = ["--config.task.name=multiplication_prose", f"--config.judge.options.model={encoder}"]
    flags += ["--config.algo.set_size=2", f"--output={tmp_path / 'out'}", "--reference=exact"]
    judges = ["--judge=exact", "--judge=embeddings:options.threshold=0.9999"]
    assert main([str(tmp_path / "responses.jsonl"), f"--config={FILE}", *flags, *judges]) == 0
    found = json.loads((tmp_path / "out" / RESULTS).read_bytes())
    assert found["judges"]["embeddings"]["clusters"]["mean"] == 2
    assert found["judges"]["embeddings"]["order_sensitivity"]["mean"] == 0
    assert [(pair["first"], pair["second"]) for pair in found["pairs"]] == [("exact", "embeddings")]
