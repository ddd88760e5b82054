"""Tests multi-turn responses: tokens and masks, seeds, order of the turns, and a single weight version."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import PATIENCE, Talking, collect, until
from test_groups import MAX_TOKENS, PROBLEMS, Recording, generate, ids, open_rollouts
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from poly_epo_jax.rollouts import turn_queue
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.types import Completion, Generation, Interactive, Problem, Request, Sampling


@pytest.fixture(autouse=True)
def wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_queue, "QUIET_SECONDS", PATIENCE)


class Replying(Talking):
    """Replies with one more question mark in each turn, until the policy's text ends with "d"."""

    def __init__(self):
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def respond(self, problem: Problem, generation: Generation) -> str | None:
        self.seen.append((problem.id, generation.turns))
        return None if generation.turns[-1].endswith("d") else "?" * (len(generation.turns) // 2 + 1)


def test_two_turns_contain_both_completions_and_the_reply():
    def say(request: Request, index: int) -> str:
        return "xd" if 1 in request.prompt_ids else "ad" if (request.problem_id, index) == ("b", 0) else "ab"

    sampler, task = Recording(say), Replying()
    assert isinstance(task, Interactive)
    groups = generate(sampler, task, 2)
    for group in groups:
        for index, y in enumerate(group.generations):
            if (group.problem.id, index) == ("b", 0):  # The only generation without a second turn.
                assert y.turns == ("ad",) and y.token_ids.tolist() == ids("ad.") and y.loss_mask.all()
                continue
            assert y.turns == ("ab", "?", "xd") and y.text == "ab?xd"
            assert y.token_ids.tolist() == ids("ab.?xd.")
            assert y.loss_mask.tolist() == [True, True, True, False, True, True, True]
            assert y.logprobs.tolist() == [-1, -1, -1, 0, -1, -1, -1]
            assert y.finish_reason == "stop" and y.logprobs.dtype == np.float32
    assert {turns for _, turns in task.seen} == {("ab",), ("ad",), ("ab", "?", "xd")}
    first, second = sampler.calls
    assert [(request.problem_id, len(request.seeds)) for request in first] == [("a", 2), ("b", 2), ("c", 2)]
    assert [request.problem_id for request in second] == ["a", "a", "b", "c", "c"]
    for request in second:
        assert request.prompt_ids.tolist() == ids(f"{request.problem_id}:ab.?")
        assert request.max_tokens == MAX_TOKENS - 4
    every_seed = [int(seed) for call in sampler.calls for request in call for seed in request.seeds]
    assert len(every_seed) == len(set(every_seed)) == 11
    again = Recording(say)
    generate(again, Replying(), 2)
    assert [r.seeds.tolist() for r in again.calls[1]] == [r.seeds.tolist() for r in second]


def test_a_group_is_yielded_with_the_last_turn_of_its_generations():
    """Groups that end with the first turn are yielded before the last turn begins."""

    async def main() -> None:
        begun = []

        class Watched(Recording):
            async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
                begun.append(len(requests))
                async for completion in super().sample(requests, sampling):
                    yield completion

        sampler = Watched(lambda request, _: "x" if request.problem_id == "b" and len(request.prompt_ids) < 6 else "d")
        seen = []
        groups = open_rollouts(sampler, Replying()).generate(PROBLEMS, 1, Sampling(MAX_TOKENS))
        async for group in groups:
            seen.append((group.problem.id, list(begun)))
        assert {name for name, _ in seen[:2]} == {"a", "c"} and seen[2:] == [("b", [3, 1, 1])]
        assert all(calls in ([3], [3, 1]) for _, calls in seen[:2])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("max_tokens", "text", "reason", "calls"),
    [
        (5, "ab?d", "stop", 2),  # "ab." and "?" leave one token for the policy.
        (4, "ab", "length", 1),  # The reply would leave no tokens, so it is omitted.
        (3, "ab", "length", 1),
    ],
)
def test_replies_count_towards_the_token_limit(max_tokens: int, text: str, reason: str, calls: int):
    class Bounded(Recording):
        def completion(self, place: int, index: int, text: str) -> Completion:
            whole, room = super().completion(place, index, text), self.calls[-1][place].max_tokens
            if len(whole.token_ids) <= room:
                return whole
            cut = {name: getattr(whole, name)[:room] for name in ("token_ids", "logprobs", "weight_versions")}
            return dataclasses.replace(whole, finish_reason="length", **cut)

    sampler = Bounded(lambda request, _: "d" if 1 in request.prompt_ids else "ab")
    for group in generate(sampler, Replying(), max_tokens=max_tokens):
        (y,) = group.generations
        assert (y.text, y.finish_reason if calls == 1 else "stop") == (text, reason)
        assert len(y.token_ids) == len(y.loss_mask) == len(y.logprobs) <= max_tokens
    assert len(sampler.calls) == calls
    assert all(request.max_tokens >= 1 for call in sampler.calls for request in call)


def test_truncated_completions_receive_no_reply():
    class Cut(Recording):
        def completion(self, place: int, index: int, text: str) -> Completion:
            return dataclasses.replace(super().completion(place, index, text), finish_reason="length")

    task = Replying()
    for group in generate(Cut(lambda *_: "ab"), task):
        assert group.generations[0].finish_reason == "length"
    assert task.seen == []


def ambiguous_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer in which the text `ab` is either one token or the tokens `a` and `b`."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4, "?": 5}
    tokenizer = Tokenizer(models.BPE({**vocabulary}, [("a", "b")]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def test_generated_tokens_are_not_encoded_again():
    tokenizer = ambiguous_tokenizer()
    assert tokenizer.encode("ab") == [4]

    class Spelling(Recording):
        def completion(self, place: int, index: int, text: str) -> Completion:
            ids = np.array([2, 3, 1], np.int32)  # "a" and "b" as separate tokens.
            return Completion(place, index, ids, np.full(3, -1, np.float32), "stop", np.zeros(3, np.int32))

    class Once(Talking):
        def respond(self, problem: Problem, generation: Generation) -> str | None:
            return "?ab" if len(generation.turns) == 1 else None

    sampler = Spelling(lambda *_: "")
    rollouts = Rollouts(sampler, tokenizer, Once(), max_prompt_tokens=8)
    ((y,),) = [group.generations for group in collect(rollouts, [Problem("p", "ab", "")], 1, Sampling(MAX_TOKENS))]
    assert sampler.calls[1][0].prompt_ids.tolist() == [4, 2, 3, 1, 5, 4]
    assert y.token_ids.tolist() == [2, 3, 1, 5, 4, 2, 3, 1]
    assert y.loss_mask.tolist() == [True, True, True, False, False, True, True, True]


def test_replies_contain_control_tokens_of_the_embedding():
    """The stop token in a reply is a control token. Without a row in the embedding, a token of a reply is an error."""
    tokenizer = ambiguous_tokenizer()
    tokenizer.add_tokens(["<extra>"])  # has id 6

    class Once(Talking):
        def __init__(self, text: str):
            self.text = text

        def respond(self, problem: Problem, generation: Generation) -> str | None:
            return self.text if len(generation.turns) == 1 else None

    def generation(text: str, vocab_size: int) -> Generation:
        rollouts = Rollouts(Recording(lambda *_: "a"), tokenizer, Once(text), 8, vocab_size=vocab_size)
        ((y,),) = [group.generations for group in collect(rollouts, [Problem("p", "ab", "")], 1, Sampling(MAX_TOKENS))]
        return y

    assert generation("?<eos>", 6).token_ids.tolist() == [2, 1, 5, 1, 2, 1]
    assert generation("?<extra>", 7).token_ids.tolist() == [2, 1, 5, 6, 2, 1]
    with pytest.raises(ValueError, match="Token '<extra>' has id 6, but the policy's embedding has only 6 rows"):
        generation("?<extra>", 6)


def test_weight_pushes_wait_for_the_last_turn():
    """Nothing is sampled between two turns, but all turns must be generated with the same weights."""

    async def main() -> None:
        may_reply, pushed = asyncio.Event(), []
        loop = asyncio.get_running_loop()

        class Waiting(Replying):
            def respond(self, problem: Problem, generation: Generation) -> str | None:
                asyncio.run_coroutine_threadsafe(may_reply.wait(), loop).result()
                return super().respond(problem, generation)

        sampler = Recording(lambda request, _: "d" if 1 in request.prompt_ids else "a")
        rollouts = open_rollouts(sampler, Waiting())

        async def push() -> None:
            await rollouts.push_weights({}, 7)
            pushed.append(7)

        async def read() -> list[Generation]:
            groups = rollouts.generate(PROBLEMS, 1, Sampling(MAX_TOKENS))
            return [group.generations[0] async for group in groups]

        reading = asyncio.create_task(read())
        await until(lambda: bool(sampler.calls))
        pushing = asyncio.create_task(push())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not pushed
        may_reply.set()
        generations = await reading
        await pushing
        assert [(set(y.weight_versions), len(y.turns)) for y in generations] == [({0}, 3)] * 3
        assert sampler.version == 7

    asyncio.run(main())


def test_a_weight_change_between_two_turns_raises_an_error():
    class Changing(Recording):
        async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            self.version = len(self.calls)
            async for completion in super().sample(requests, sampling):
                yield completion

    with pytest.raises(RuntimeError, match="weights changed from version 0 to 1 between two turns of problem 'a'"):
        generate(Changing(lambda *_: "a"), Replying())


@pytest.mark.parametrize("reply", [3, b"?", ["?"], True])
def test_a_reply_that_is_no_text_is_rejected(reply: object):
    class Odd(Replying):
        def respond(self, problem: Problem, generation: Generation) -> Any:
            return reply

    with pytest.raises(
        ValueError, match=rf"^TalkingEpisode\.reply returned .*\({type(reply).__name__}\) for problem '.'; return"
    ):
        generate(Recording(lambda request, index: "ab"), Odd(), 2)
