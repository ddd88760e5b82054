"""The sampler inside the trainer: against transformers, against the trainer's forward pass, and by its statistics."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from fakes import TINY, TINY_ALPHABET, TINY_MODEL, collect, on_mesh, tiny_params, tiny_problems, trainer_logprobs
from flax import nnx

from poly_epo_jax.model import hf
from poly_epo_jax.model.sharding import make_mesh
from poly_epo_jax.rollouts.embedded import EmbeddedRollouts, _kept
from poly_epo_jax.tokenizer import build_character_tokenizer
from poly_epo_jax.types import Problem, Rollouts, Sampling

torch.set_num_threads(1)
STOP_IDS = (1, 14, 26)
MAX_PROMPT, MAX_TOKENS = 10, 12
MESH = make_mesh(1, 1, 1)
TOKENIZER = build_character_tokenizer(TINY_ALPHABET)


def make_rollouts(seed=0, max_rows=64):
    rollouts = EmbeddedRollouts(TINY_MODEL, MESH, TOKENIZER, STOP_IDS, MAX_PROMPT, max_rows)
    asyncio.run(rollouts.update_weights(on_mesh(tiny_params(seed), MESH), 0))
    return rollouts


PROBLEMS = tiny_problems(10, MAX_PROMPT)


def generate(rollouts, problems, num_generations, max_tokens=MAX_TOKENS, **sampling):
    return collect(rollouts, problems, num_generations, Sampling(max_tokens, **sampling))


def token_ids(groups):
    return [[y.token_ids.tolist() for y in group.generations] for group in groups]


def assert_same_generations(found, expected):
    assert token_ids(found) == token_ids(expected)
    for one, other in zip(found, expected, strict=True):
        for y, z in zip(one.generations, other.generations, strict=True):
            np.testing.assert_allclose(y.logprobs, z.logprobs, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def rollouts():
    return make_rollouts()


@pytest.fixture(scope="module")
def groups(rollouts):
    return generate(rollouts, PROBLEMS, 4)


def test_greedy_generations_are_those_of_transformers(tmp_path):
    params = tiny_params()
    hf.save_pretrained(tmp_path / "model", params, TINY, dtype="float32")
    transformer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    problems = tiny_problems(30, MAX_PROMPT, seed=1)
    found = generate(make_rollouts(), problems, 1, temperature=0.0)
    for problem, group in zip(problems, found, strict=True):
        ids = TOKENIZER(problem.prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = transformer.generate(  # pyright: ignore[reportAttributeAccessIssue]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=list(STOP_IDS),
                pad_token_id=0,
            )
        assert group.generations[0].token_ids.tolist() == out[0, ids.shape[1] :].tolist()
    reasons = [group.generations[0].finish_reason for group in found]
    assert min(reasons.count("stop"), reasons.count("length")) >= 8
    assert len({tuple(ids) for (ids,) in token_ids(found)}) > 20


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_trainers(rollouts, temperature):
    groups = generate(rollouts, PROBLEMS, 4, temperature=temperature)
    trainer, sampler = trainer_logprobs(0, groups, temperature)
    assert len(trainer) > 200 and trainer.std() > 0.5
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)


def test_groups_come_whole_and_in_order(rollouts, groups):
    assert isinstance(rollouts, Rollouts)
    assert [group.problem for group in groups] == PROBLEMS
    for group in groups:
        assert group.prompt_ids.tolist() == [TINY_ALPHABET.index(character) + 2 for character in group.problem.prompt]
        assert len(group.generations) == 4


def test_a_stop_token_ends_a_generation(groups):
    spelling = ["<pad>", "<eos>", *TINY_ALPHABET]
    reasons = []
    for y in (y for group in groups for y in group.generations):
        ids = y.token_ids.tolist()
        assert len(y.logprobs) == len(ids) and 1 <= len(ids) <= MAX_TOKENS
        assert not set(ids[:-1]) & set(STOP_IDS)
        stopped = ids[-1] in STOP_IDS
        assert stopped or len(ids) == MAX_TOKENS
        assert y.finish_reason == ("stop" if stopped else "length")
        assert y.text == "".join(spelling[token] for token in (ids[:-1] if stopped else ids))
        reasons.append(y.finish_reason)
    assert min(reasons.count("stop"), reasons.count("length")) >= 5


def test_generations_of_a_prompt_differ(groups):
    # Those that stop at once may agree.
    long = [tuple(ids) for of_prompt in token_ids(groups) for ids in of_prompt if len(ids) > 5]
    assert len(set(long)) == len(long) > 10


def test_a_generation_depends_on_its_seed_alone(rollouts, groups):
    few_at_once = make_rollouts(max_rows=12)  # three prompts; the last batch has one, and padding
    assert_same_generations(generate(few_at_once, PROBLEMS, 4), groups)
    assert_same_generations(generate(few_at_once, PROBLEMS[:3], 4), groups[:3])
    other_neighbours = [PROBLEMS[0], *tiny_problems(10, MAX_PROMPT, seed=1)[1:-1], PROBLEMS[-1]]
    found = generate(rollouts, other_neighbours, 4)
    assert_same_generations([found[0], found[-1]], [groups[0], groups[-1]])
    assert token_ids(found[1:-1]) != token_ids(groups[1:-1])


def test_another_seed_gives_other_generations(rollouts, groups):
    assert_same_generations(generate(rollouts, PROBLEMS, 4), groups)
    pairs = zip(token_ids(groups), token_ids(generate(rollouts, PROBLEMS, 4, seed=1)), strict=True)
    assert all(one != other for one, other in pairs)


@jax.jit
def hidden_and_head(params, tokens):
    model = nnx.merge(nnx.split(TINY_MODEL)[0], params)
    return model(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens)), model.head


def next_probabilities(ids, temperature):
    """softmax(logits / temperature) of what follows `ids`, in float64."""
    tokens = np.zeros((1, MAX_PROMPT + MAX_TOKENS), np.int32)
    tokens[0, : len(ids)] = ids
    hidden, head = (np.asarray(x, np.float64) for x in hidden_and_head(tiny_params(), tokens))
    p = np.exp(hidden[0, len(ids) - 1] @ head.T / temperature)
    return p / p.sum()


def assert_drawn_from(tokens, probabilities):
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    expected = len(tokens) * probabilities
    often = expected > 5
    z = (counts - expected)[often] / np.sqrt(expected * (1 - probabilities))[often]
    assert often.sum() > 2 and np.abs(z).max() < 4.5


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 6)], ids=["all", "filtered"])
def test_tokens_are_drawn_from_the_softmax(top_p, top_k):
    """The first token, and the second after the commonest first, of 4096 generations of one prompt."""
    (group,) = generate(make_rollouts(), PROBLEMS[4:5], 4096, max_tokens=2, temperature=0.7, top_p=top_p, top_k=top_k)
    first = np.array([y.token_ids[0] for y in group.generations])
    common = np.bincount(np.where(np.isin(first, STOP_IDS), 0, first)).argmax()
    second = [y.token_ids[1] for y in group.generations if y.token_ids[0] == common]
    assert common and len(second) > 300
    for tokens, before in ((first, ()), (np.array(second), (common,))):
        unfiltered = next_probabilities([*group.prompt_ids, *before], 0.7)
        kept = reference_kept(unfiltered, top_p, top_k)
        assert kept.sum() < TINY.vocab_size or not top_k
        assert_drawn_from(tokens, np.where(kept, unfiltered, 0) / unfiltered[kept].sum())
        logprobs = [y.logprobs[len(before)] for y in group.generations if not before or y.token_ids[0] == common]
        np.testing.assert_allclose(logprobs, np.log(unfiltered[tokens]), rtol=0, atol=1e-4)  # not renormalised


def reference_kept(probabilities, top_p, top_k):
    """By sorting. Ties with the last token kept are kept too."""
    ordered = np.sort(probabilities)[::-1]
    kept = probabilities >= ordered[min(top_k or len(ordered), len(ordered)) - 1]
    ordered = ordered[ordered >= probabilities[kept].min()]
    reaches = ordered.cumsum() / ordered.sum() >= top_p
    return kept & (probabilities >= (ordered[reaches.argmax()] if top_p < 1 else 0))


FILTERS = [(0.1, 0), (0.5, 0), (0.9, 0), (0.99, 0), (0.999, 0), (1.0, 1), (1.0, 10), (1.0, 1000), (0.5, 1), (0.9, 10)]


@pytest.mark.parametrize(("top_p", "top_k"), FILTERS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("ties", [False, True])
def test_filters_keep_what_sorting_keeps(top_p, top_k, spread, ties):
    logits = np.random.default_rng(0).normal(scale=spread, size=(50, 300)).astype(np.float32)
    if ties:
        logits = np.round(logits * 4) / 4
    probabilities = np.exp(logits.astype(np.float64))
    expected = np.stack([reference_kept(row / row.sum(), top_p, top_k) for row in probabilities])
    kept = jax.jit(_kept, static_argnums=(1, 2))(jnp.asarray(logits), top_p, top_k)
    np.testing.assert_array_equal(kept, expected)
    if top_k and not ties:
        assert (expected.sum(axis=1) <= top_k).all()


def test_filters_by_hand():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))

    def kept(top_p, top_k):
        return np.flatnonzero(_kept(logits, top_p, top_k)[0]).tolist()

    assert kept(1.0, 0) == [0, 1, 2, 3]
    assert kept(1.0, 2) == [1, 3]
    assert kept(0.39, 0) == [1]
    assert kept(0.41, 0) == [1, 3]
    assert kept(0.91, 0) == [0, 1, 2, 3]
    assert kept(0.75, 3) == [1, 3]  # 0.7 of the 0.9 that top-k leaves


def test_new_weights_change_generations_and_their_version(rollouts, groups):
    assert {y.weight_version for group in groups for y in group.generations} == {0}
    asyncio.run(rollouts.update_weights(on_mesh(tiny_params(1), MESH), 7))
    changed = generate(rollouts, PROBLEMS, 4)
    assert {y.weight_version for group in changed for y in group.generations} == {7}
    assert all(one != other for one, other in zip(token_ids(changed), token_ids(groups), strict=True))
    trainer, sampler = trainer_logprobs(1, changed, 1.0)
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)
    asyncio.run(rollouts.update_weights(on_mesh(tiny_params(0), MESH), 0))
    assert_same_generations(generate(rollouts, PROBLEMS, 4), groups)


def test_a_prompt_that_is_too_long_is_refused(rollouts):
    too_long = Problem("seven", "a" * 11, "")
    message = "The prompt of problem seven has 11 tokens, more than train.max_prompt_tokens=10; raise that, or"
    with pytest.raises(ValueError, match=message):
        generate(rollouts, [*PROBLEMS[:9], too_long], 4)


def test_an_empty_prompt_is_refused(rollouts):
    with pytest.raises(ValueError, match="The prompt of problem blank is empty; leave the problem out"):
        generate(rollouts, [Problem("blank", "", "")], 4)
