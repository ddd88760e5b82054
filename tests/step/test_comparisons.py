"""Tests of the comparisons of configs/polaris.py: their keys, and the prompts on which their methods are trained."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from itertools import chain

import httpx
import numpy as np
import pytest
from fakes import LETTERS, PROBLEMS, ByLetter, LetterJudge

from configs import polaris
from poly_epo_jax.config.keys import updates_per_step
from poly_epo_jax.config.section import changed_keys
from poly_epo_jax.rollouts.grading import grade_groups, usable_groups
from poly_epo_jax.startup.read_config import make_judge, read_config
from poly_epo_jax.step.advantages import batch_features, make_advantages, make_estimator
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.packing import PackedBatch, pack
from poly_epo_jax.system import http_client
from poly_epo_jax.types import Clustering, Generation, Group, Problem

FOUR_PROBLEMS = [*PROBLEMS, Problem("s", "s:", "a")]


def random_group(problem: Problem, rng: np.random.Generator) -> Group:
    """Returns a group of 8 responses of 1 to 6 tokens, with both rewards and several strategies."""

    def generation(text: str) -> Generation:
        ids = rng.integers(2, 20, rng.integers(1, 7)).astype(np.int32)
        return Generation(
            ids,
            np.full(len(ids), -1, np.float32),
            np.ones(len(ids), bool),
            (text,),
            "stop",
            np.zeros(len(ids), np.int32),
        )

    letters = [*"aab", *rng.choice(list(LETTERS), 5)]
    return Group(problem, np.array([7, 8, 9], np.int32), tuple(generation(letter) for letter in letters))


async def generate() -> AsyncIterator[Group]:
    rng = np.random.default_rng(0)
    for problem in FOUR_PROBLEMS:
        yield random_group(problem, rng)


def minibatches(names: str) -> list[list[PackedBatch]]:
    """Returns the minibatches of a batch of four prompts. The judge fails on one of them."""
    config = read_config(polaris.get_config(names))
    graded = asyncio.run(grade_groups(generate(), FOUR_PROBLEMS, ByLetter(), LetterJudge(["q"])))
    usable = usable_groups(graded, make_estimator(config.algo).reads_judge, config.judge.on_failure)
    advantages = make_advantages(config.algo, config.seed)(
        1, [graded.group.problem for graded in usable], batch_features(usable)
    )
    rows = partial(pack, row_tokens=20, rows_per_microbatch=2)
    packer = MinibatchPacker(
        updates_per_step(config.train), rows, config.algo.length_normalization, config.sampling.max_tokens
    )
    return packer(usable, advantages)


def test_the_matched_comparison_changes_only_the_advantages():
    """Token ids, weights and all other arrays of the minibatches are equal, although the judge failed on a prompt."""
    expected, found = minibatches("poly_epo"), minibatches("grpo,matched")
    assert [len(batches) for batches in found] == [len(batches) for batches in expected]
    for batch, other in zip(chain(*found), chain(*expected), strict=True):
        for name in set(PackedBatch._fields) - {"advantages"}:
            np.testing.assert_array_equal(getattr(batch, name), getattr(other, name), name)
        assert not np.array_equal(batch.advantages, other.advantages)
    unmatched = minibatches("grpo")  # also contains the prompt on which the judge failed
    assert sum(batch.targets.size for batch in chain(*unmatched)) > sum(batch.targets.size for batch in chain(*found))


@pytest.mark.parametrize("method", ["grpo", "grpo_div", "max_rl"])
def test_the_matched_comparison_changes_only_the_method(method: str):
    base, matched = (polaris.get_config(names).to_dict() for names in ("poly_epo", f"{method},matched"))
    assert changed_keys(base, matched) == ["algo.advantages", "judge.on_failure", "workdir"]


@pytest.mark.parametrize(("method", "clip_high"), [("poly_epo", 0.28), ("grpo", 0.2)])
def test_the_authors_comparison(method: str, clip_high: float):
    config = polaris.get_config(f"h200x4,authors,{method}")
    assert (config.mesh.num_devices, config.workdir) == (4, f"runs/polaris-authors-{method}")
    config = read_config(config)
    assert config.algo.clip_high == clip_high
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (1e-6, 0.01)
    assert (config.judge.on_failure, config.judge.max_failed_fraction) == ("distinct", 1.0)


def test_the_authors_comparison_sends_the_request_of_the_authors_code(monkeypatch: pytest.MonkeyPatch):
    requests = []

    def reply(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        verdicts = {str(n): {"chain_of_thought": "Macro: sum.", "cluster_id": n} for n in range(1, 9)}
        message = {"role": "assistant", "content": json.dumps(verdicts)}
        return httpx.Response(200, json={"choices": [{"finish_reason": "stop", "message": message}]})

    monkeypatch.setattr(http_client, "open_transport", lambda proxy: httpx.MockTransport(reply))
    monkeypatch.setenv("GEMINI_API_KEY", "key")
    config = read_config(polaris.get_config("poly_epo,authors"))
    judge = make_judge(config.judge, ByLetter())
    clustering = asyncio.run(judge.cluster(random_group(PROBLEMS[0], np.random.default_rng(0))))
    assert isinstance(clustering, Clustering) and clustering.ids.tolist() == list(range(1, 9))

    (request,) = requests
    assert str(request.url) == "https://generativelanguage.googleapis.com/v1beta/openai/chat/completions"
    body = json.loads(request.content)
    (message,) = body.pop("messages")
    assert message["role"] == "user" and '"chain_of_thought"' in message["content"]
    expected = {"model": "gemini-2.0-flash", "temperature": 0.0, "response_format": {"type": "json_object"}}
    assert body == expected | {"max_tokens": 8192}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("grpo_div,authors", r"':grpo_div,authors'.* estimator and a script of grpo_div; choose poly_epo or grpo"),
        ("dapo,matched", r"':dapo,matched'.* advantages of dapo are those of grpo; choose poly_epo or grpo or "),
        ("dapo,authors", r"':dapo,authors'.* script of dapo; choose poly_epo or grpo, "),
        ("matched,authors", r"':matched,authors'.* more than one comparison, matched and authors"),
        ("author", r"':author'.* a method \(poly_epo, .* a mesh \(laptop, .* a comparison \(authors, matched\)"),
    ],
)
def test_other_names_are_rejected(names: str, message: str):
    with pytest.raises(ValueError, match=message):
        polaris.get_config(names)
