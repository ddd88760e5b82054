"""Tests of the judge that clusters responses by character n-grams."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from responses import response
from training_runs import Run

from configs import polynomial
from poly_epo_jax.config.keys import ConfigError, JudgeSection
from poly_epo_jax.judges.ngrams import component_roots
from poly_epo_jax.records.run_folder import GENERATIONS, read_method, read_rows
from poly_epo_jax.startup.read_config import make_judge, read_config
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Group, Problem

ROOT = Path(__file__).parents[2]


def cluster(texts: list[str], **options: object) -> Clustering:
    judge = make_judge(JudgeSection(name="ngrams", options=options), PolynomialTask(num_train=1, num_held_out=1))
    group = Group(Problem(id="p", prompt="?", answer=""), np.zeros(1, np.int32), tuple(map(response, texts)))
    clustering = asyncio.run(judge.cluster(group))
    assert isinstance(clustering, Clustering)
    return clustering


def counted(text: str, length: int) -> dict[str, int]:
    ngrams = [text[i : i + length] for i in range(max(len(text) - length + 1, 1))]
    return {ngram: ngrams.count(ngram) for ngram in ngrams}


def test_cosines_are_computed_from_ngram_counts():
    texts = ["(x=1,y=11)", "(x=1,y=12)", "a", "é🙂é🙂", "quite another text"]
    found = cluster(texts, dimensions=65536).features["embeddings"]
    for i, first in enumerate(texts):
        for j, second in enumerate(texts):
            one, other = counted(first, 3), counted(second, 3)
            product = sum(count * other.get(ngram, 0) for ngram, count in one.items())
            norms = [np.sqrt(sum(count**2 for count in ngrams.values())) for ngrams in (one, other)]
            assert found[i] @ found[j] == pytest.approx(product / np.prod(norms), abs=1e-5)


def test_equal_texts_share_a_cluster_and_an_empty_one_is_degenerate():
    texts = ["(x=1,y=11)", "(x=1,y=12)", "", "(x=1,y=11)", " "]
    found = cluster(texts)
    assert found.ids.tolist() == [0, 1, DEGENERATE_CLUSTER, 0, 2] and found.ids.dtype == np.int32
    assert not found.features["embeddings"][2].any()


def test_a_lower_threshold_joins_similar_texts():
    texts = ["we factor it as (x-1)(x-2)", "we factor it as (x-1)(x-3)", "by the quadratic formula"]
    assert cluster(texts, threshold=0.7).ids.tolist() == [0, 0, 1]
    assert cluster(texts, threshold=0.0).ids.tolist() == [0, 0, 0]


def test_connected_texts_share_a_cluster_in_any_order():
    is_near = np.eye(6, dtype=bool)
    for i, j in ((0, 3), (3, 5), (5, 1)):
        is_near[i, j] = is_near[j, i] = True
    assert component_roots(is_near).tolist() == [0, 0, 2, 0, 4, 0]
    texts = ["aaaa bbbb", "bbbb cccc", "cccc dddd", "zzzz"]
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        ids = cluster([texts[i] for i in order], threshold=0.3).ids
        assert len({int(ids[order.index(i)]) for i in range(3)}) == 1 and len(set(ids.tolist())) == 2


def test_embeddings_are_equal_in_all_processes():
    code = (
        "import numpy as np, sys; from poly_epo_jax.judges.ngrams import NgramsJudge; "
        "print(NgramsJudge(None, None, dimensions=32)._embedded('(x=1,y=11)').tobytes().hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == cluster(["(x=1,y=11)"], dimensions=32).features["embeddings"][0].tobytes().hex()


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"threshold": 1.5}, r"judge\.options\.threshold=1\.5 must lie between 0 and 1"),
        ({"length": 0}, r"judge\.options\.length=0 must lie between 1 and 16"),
        ({"dimensions": 1}, r"judge\.options\.dimensions=1 must lie between 2 and"),
        ({"model": "bert"}, r"judge\.options has 'model'"),
    ],
)
def test_invalid_options_are_rejected(option: dict, sentence: str):
    config = polynomial.get_config("grpo")
    config.judge.name, config.judge.options = "ngrams", option
    with pytest.raises(ConfigError, match=sentence):
        read_config(config)


@pytest.mark.slow
def test_an_embedding_based_estimator_trains_from_configuration_keys(tmp_path: Path, caches: dict[str, Path]):
    changes = {"judge.name": "ngrams", "algo.advantages": "rep_exp", "algo.options.beta": 0.5, "train.num_steps": 2}
    run = Run(tmp_path, "rep_exp", changes | {"base.clean_steps": 300, "log.generations_every": 1} | caches)
    run.finish()
    assert read_method(run.folder) == "RepExp"
    groups: dict[tuple, list[dict]] = {}
    for row in read_rows(run.folder / GENERATIONS):
        groups.setdefault((row["step"], row["problem"], row["occurrence"]), []).append(row)
    solved = [row for rows in groups.values() if any(row["reward"] for row in rows) for row in rows]
    # For equal rewards, advantages differ only because of the embeddings.
    assert len({(row["reward"], row["advantage"]) for row in solved}) > len({row["reward"] for row in solved})
    for rows in groups.values():
        assert len({row["cluster"] for row in rows}) <= len({row["response"] for row in rows})
