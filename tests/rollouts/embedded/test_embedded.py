"""Compares the embedded sampler with the trainer's forward pass, and tests the distribution of its tokens."""

import asyncio
import dataclasses
import threading
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import (
    PATIENCE,
    TINY,
    TINY_ALPHABET,
    TINY_MODEL,
    Talking,
    on_mesh,
    tiny_params,
    tiny_problems,
    trainer_logprobs,
    until,
)
from flax import nnx
from samplers import MAX_PROMPT, MAX_TOKENS, MESH, STOP_IDS, generate, make_rollouts, token_ids
from test_token_sampling import reference_kept

from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts.embedded import programs, slots
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedSampler
from poly_epo_jax.rollouts.embedded.slots import Slots, cache_sizes
from poly_epo_jax.rollouts.groups import generation_seeds
from poly_epo_jax.types import Generation, Problem, Request, Sampler, Sampling

PROBLEMS = tiny_problems(10, MAX_PROMPT)


def assert_same_generations(found, expected, atol=1e-5):
    assert token_ids(found) == token_ids(expected)
    for one, other in zip(found, expected, strict=True):
        for y, z in zip(one.generations, other.generations, strict=True):
            np.testing.assert_allclose(y.logprobs, z.logprobs, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def rollouts():
    return make_rollouts(max_concurrent=16)  # Prompts are prefilled in several parts, and slots are reused.


@pytest.fixture(scope="module")
def groups(rollouts):
    return generate(rollouts, PROBLEMS, 4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_match_the_trainer(rollouts, temperature):
    groups = generate(rollouts, PROBLEMS, 4, temperature=temperature)
    trainer, sampler = trainer_logprobs(0, groups, temperature)
    assert len(trainer) > 200 and trainer.std() > 0.5
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)


def test_groups_are_complete(rollouts, groups):
    assert isinstance(rollouts.sampler, Sampler)
    assert [group.problem for group in groups] == PROBLEMS
    for group in groups:
        assert group.prompt_ids.tolist() == [TINY_ALPHABET.index(character) + 2 for character in group.problem.prompt]
        assert len(group.generations) == 4
        assert all(y.loss_mask.all() and y.loss_mask.shape == y.token_ids.shape for y in group.generations)


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


def test_each_request_has_its_own_token_limit(rollouts, groups):
    """A shorter limit truncates a generation, and does not change its tokens."""
    requests = [
        Request(group.problem.id, group.prompt_ids, generation_seeds(0, group.problem, 4), 1 + place)
        for place, group in enumerate(groups)
    ]

    async def sample() -> list[list[list[int]]]:
        completions = rollouts.sampler.sample(requests, Sampling(MAX_TOKENS))
        found = {(y.request, y.index): y.token_ids.tolist() async for y in completions}
        return [[found[place, index] for index in range(4)] for place in range(len(groups))]

    expected = [[ids[: 1 + place] for ids in group] for place, group in enumerate(token_ids(groups))]
    assert asyncio.run(sample()) == expected


def test_generations_of_a_prompt_differ(groups):
    # Short generations may be equal by chance.
    long = [tuple(ids) for group in token_ids(groups) for ids in group if len(ids) > 5]
    assert len(set(long)) == len(long) > 10


@pytest.mark.slow
def test_a_generation_depends_only_on_its_prompt_and_seed(rollouts, groups):
    few_at_once = make_rollouts(max_concurrent=10)  # The generations of a prompt are not all decoded at once.
    assert_same_generations(generate(few_at_once, PROBLEMS, 4), groups)
    assert_same_generations(generate(few_at_once, PROBLEMS[:3], 4), groups[:3])
    other_neighbors = [PROBLEMS[0], *tiny_problems(10, MAX_PROMPT, seed=1)[1:-1], PROBLEMS[-1]]
    found = generate(rollouts, other_neighbors, 4)
    assert_same_generations([found[0], found[-1]], [groups[0], groups[-1]])
    assert token_ids(found[1:-1]) != token_ids(groups[1:-1])


def test_other_seeds_give_other_generations(rollouts, groups):
    assert_same_generations(generate(rollouts, PROBLEMS, 4), groups)
    pairs = zip(token_ids(groups), token_ids(generate(rollouts, PROBLEMS, 4, seed=1)), strict=True)
    assert all(one != other for one, other in pairs)


@jax.jit
def hidden_and_head(params, tokens):
    model = nnx.merge(nnx.split(TINY_MODEL)[0], params)
    return model(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens)), model.head


def next_probabilities(ids, temperature):
    """Returns softmax(logits / temperature) of the token after `ids`, in float64."""
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


@pytest.mark.slow
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 6)], ids=["all", "filtered"])
def test_tokens_are_sampled_from_the_softmax(top_p, top_k):
    """Tests the first token, and the second token after the most frequent first token, of 4096 generations."""
    (group,) = generate(
        make_rollouts(max_concurrent=4096), PROBLEMS[4:5], 4096, max_tokens=2, temperature=0.7, top_p=top_p, top_k=top_k
    )
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
        np.testing.assert_allclose(logprobs, np.log(unfiltered[tokens]), rtol=0, atol=1e-4)  # Not renormalized.


def test_new_weights_change_generations_and_weight_version(rollouts, groups):
    assert {version for group in groups for y in group.generations for version in y.weight_versions} == {0}
    asyncio.run(rollouts.push_weights(on_mesh(tiny_params(1), MESH), 7))
    changed = generate(rollouts, PROBLEMS, 4)
    assert {version for group in changed for y in group.generations for version in y.weight_versions} == {7}
    assert all(one != other for one, other in zip(token_ids(changed), token_ids(groups), strict=True))
    trainer, sampler = trainer_logprobs(1, changed, 1.0)
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)
    asyncio.run(rollouts.push_weights(on_mesh(tiny_params(0), MESH), 0))
    assert_same_generations(generate(rollouts, PROBLEMS, 4), groups)


def test_prompts_that_are_too_long_raise_an_error(rollouts):
    too_long = Problem("seven", "a" * 11, "")
    message = r"prompt of problem 'seven' has 11 tokens, more than train\.max_prompt_tokens=10"
    with pytest.raises(ValueError, match=message):
        generate(rollouts, [*PROBLEMS[:9], too_long], 4)


def test_empty_prompts_raise_an_error(rollouts):
    with pytest.raises(ValueError, match="prompt of problem 'blank' is empty"):
        generate(rollouts, [Problem("blank", "", "")], 4)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_tensor_parallel_tokens_match_one_device(rollouts, groups):
    """The weights are in float32. Heads, MLP and vocabulary are sharded over two devices, and rows over four."""
    sharded = make_rollouts(max_concurrent=16, mesh=make_mesh(2, 2, 2))
    assert_same_generations(generate(sharded, PROBLEMS, 4), groups)
    correlated = [generate(sampler, PROBLEMS, 4, correlated=True) for sampler in (sharded, rollouts)]
    assert_same_generations(correlated[0], correlated[1])


@pytest.mark.slow
def test_refilled_slots_match_single_requests(monkeypatch):
    """Compares many responses of different lengths, which use caches of all sizes, with single requests.

    The caches of single requests are not resized.
    """
    problems, sampling = tiny_problems(9, MAX_PROMPT, seed=3), {"max_tokens": 90}
    busy, alone = make_rollouts(max_concurrent=5), make_rollouts(max_concurrent=1)
    found = generate(busy, problems, 4, **sampling)
    monkeypatch.setattr(slots, "SHORT_CACHE", MAX_PROMPT + 90)
    expected = [generate(alone, [problem], 4, **sampling)[0] for problem in problems]
    # Rounding depends on the cache size: 99% of the values differ by less than 2e-6, one of 2,800 by 1.1e-5.
    assert_same_generations(found, expected, atol=2e-5)
    lengths = {len(y.token_ids) for group in found for y in group.generations}
    assert min(lengths) < 5 and max(lengths) > 40 and len(lengths) >= 9


@pytest.mark.slow
def test_refilled_slots_of_a_model_with_windows():
    """The trainer, which has no cache, assigns the same log-probabilities to all tokens of reused slots.

    Slots of responses that have exceeded the windows are reused by prompts of 1 to MAX_PROMPT tokens. One window is
    shorter than most prompts, the other longer.
    """
    config = dataclasses.replace(TINY, num_layers=3, windows=(4, 7, 0))
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    rollouts = make_rollouts(max_concurrent=5, model=model)
    groups = generate(rollouts, tiny_problems(11, MAX_PROMPT, seed=3), 4, max_tokens=90)
    lengths = [len(y.token_ids) for group in groups for y in group.generations]
    assert min(lengths) < 5 and sum(length > 7 for length in lengths) > 5
    trainer, sampler = trainer_logprobs(0, groups, 1.0, model)
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)


class Asking(Talking):
    """Replies twice."""

    def respond(self, problem: Problem, generation: Generation) -> str | None:
        return "ab" if len(generation.turns) < 5 else None


@pytest.mark.slow
def test_later_turns_continue_after_all_previous_tokens():
    """Compares with the trainer's log-probabilities of the generated tokens, and with single requests."""
    problems, sampling = tiny_problems(9, MAX_PROMPT, seed=6), {"max_tokens": 40, "temperature": 0.7}
    groups = generate(make_rollouts(task=Asking()), problems, 4, **sampling)
    generations = [y for group in groups for y in group.generations]
    lengths = [len(y.turns) for y in generations]
    assert {1, 3, 5} == set(lengths) and lengths.count(5) > 5
    assert all(len(y.token_ids) <= 40 for y in generations)
    trainer, sampler = trainer_logprobs(0, groups, 0.7)
    assert len(trainer) < sum(len(y.token_ids) for y in generations) and (sampler != 0).all()
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)
    alone = make_rollouts(max_concurrent=1, task=Asking())
    assert_same_generations(generate(alone, problems[:3], 4, **sampling), groups[:3])


def number_of_programs():
    return programs.decode.jitted._cache_size()


@pytest.mark.slow
def test_later_calls_do_not_compile_again():
    """Calls of the same size share the compiled decoding loop, also in other instances of the sampler."""
    problems = tiny_problems(12, MAX_PROMPT, seed=4)
    generate(make_rollouts(max_concurrent=8), problems[:4], 4)
    compiled = number_of_programs()
    for start in (2, 5, 8):
        generate(make_rollouts(max_concurrent=8), problems[start : start + 4], 4, seed=start)
    assert number_of_programs() == compiled


@pytest.mark.slow
def test_groups_are_yielded_early_without_blocking_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    """Before each call of the device, the event loop runs for several iterations, and yields complete groups."""
    rollouts = make_rollouts(max_concurrent=4)
    generate(rollouts, PROBLEMS, 4)  # Compiles the programs.
    advance, ticked = Slots.advance, threading.Event()

    def advance_after_ticks(slots: Slots):
        for _ in range(20):
            ticked.clear()
            assert ticked.wait(PATIENCE)
        return advance(slots)

    monkeypatch.setattr(Slots, "advance", advance_after_ticks)

    async def watch() -> tuple[list[int], int]:
        ticks, seen = 0, []

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1
                ticked.set()

        ticking = asyncio.create_task(tick())
        async for _ in rollouts.generate(PROBLEMS, 4, Sampling(MAX_TOKENS)):
            seen.append(ticks)
        ticking.cancel()
        return seen, ticks

    seen, ticks = asyncio.run(watch())
    assert len(seen) == len(PROBLEMS) and len(set(seen)) > 3 and seen[0] > 0 and ticks > seen[0]


def test_a_cancelled_generation_waits_for_its_thread_and_leaves_no_state(rollouts, groups):
    busy: list[bool] = []
    advance, may_go_on = Slots.advance, threading.Event()

    def watched(slots: Slots):
        busy.append(True)
        assert may_go_on.wait(PATIENCE)
        finished = advance(slots)
        busy.pop()
        return finished

    async def first_of(problems) -> None:
        iterator = rollouts.generate(problems, 4, Sampling(MAX_TOKENS))
        async for _ in iterator:
            break
        await iterator.aclose()

    async def cancelled() -> None:
        task = asyncio.create_task(first_of(PROBLEMS[:1]))
        await until(lambda: bool(busy))
        task.cancel()
        for _ in range(10):  # A task that does not wait for the thread would end during these iterations.
            await asyncio.sleep(0)
        has_waited = not task.done()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert has_waited and not busy  # The device is idle.

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slots, "advance", watched)
        may_go_on.set()
        asyncio.run(first_of(PROBLEMS))
        may_go_on.clear()
        asyncio.run(cancelled())
    assert_same_generations(generate(rollouts, PROBLEMS, 4), groups)


@pytest.mark.parametrize(("length", "sizes"), [(24, [24]), (192, [24, 48, 96, 144, 192]), (66, [8, 16, 40, 56, 66])])
def test_cache_sizes(length, sizes):
    assert cache_sizes(length) == sizes


def test_calls_of_different_sizes_share_few_numbers_of_slots(monkeypatch: pytest.MonkeyPatch):
    """Each number of slots compiles another program."""
    found: list[int] = []

    def record(self: Slots, *arguments: object, **_: object) -> None:
        found.append(cast(int, arguments[7]))

    monkeypatch.setattr(Slots, "__init__", record)
    monkeypatch.setattr(EmbeddedSampler, "weights", None)
    for full_batch, expected in ((0, [6, 5, 4, 3, 2, 1]), (4, [6, 5, 4, 4, 2, 1])):
        embedded = EmbeddedSampler(TINY_MODEL, make_mesh(1, 1, 1), [1], MAX_PROMPT, 512, 8 * full_batch)
        for count in range(6, 0, -1):
            prompt = Request("p", np.arange(2, dtype=np.int32), np.arange(8, dtype=np.uint32), MAX_TOKENS)
            embedded._slots([prompt] * count, Sampling(MAX_TOKENS))
        sizes, found[:] = [size / 8 for size in found], []
        assert sizes == expected
