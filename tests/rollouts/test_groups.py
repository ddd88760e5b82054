"""Tests `Rollouts` with predefined completions: grouping, seeds, and the conversion between text and tokens."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import ByLetter, Scripted, collect, until

from poly_epo_jax.rollouts.groups import Rollouts, generation_seeds
from poly_epo_jax.rollouts.prompts import drop_long_prompts
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.types import Completion, Problem, Request, Sampler, Sampling

ALPHABET = "abcdxyz?:"
PROBLEMS = [Problem(name, f"{name}:", "") for name in "abc"]
STOP = "."
MAX_TOKENS = 12


def ids(text: str) -> list[int]:
    """Returns the tokens of a text in which STOP represents the stop token."""
    return [1 if character == STOP else ALPHABET.index(character) + 2 for character in text]


class Recording(Scripted):
    """Records the requests of each call."""

    def __init__(self, say: Callable[[Request, int], str]):
        super().__init__(say, ALPHABET)
        self.calls: list[list[Request]] = []

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        self.calls.append(list(requests))
        async for completion in super().sample(requests, sampling):
            yield completion


def open_rollouts(sampler: Scripted, task: ByLetter | None = None) -> Rollouts:
    return Rollouts(sampler, sampler.tokenizer, task or ByLetter(), max_prompt_tokens=8)


def generate(sampler: Scripted, task: ByLetter, num_generations: int = 1, max_tokens: int = MAX_TOKENS):
    return collect(open_rollouts(sampler, task), PROBLEMS, num_generations, Sampling(max_tokens))


def test_groups_contain_completions_in_the_order_of_their_seeds():
    class Shuffled(Recording):
        async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            completions = [completion async for completion in super().sample(requests, sampling)]
            for place in np.random.default_rng(0).permutation(len(completions)):
                yield completions[place]

    sampler = Shuffled(lambda request, index: f"{request.problem_id}{'xyz?'[index]}")
    assert isinstance(sampler, Sampler)
    for problem, group in zip(PROBLEMS, generate(sampler, ByLetter(), 4), strict=True):
        assert group.problem is problem and group.prompt_ids.tolist() == ids(problem.prompt)
        assert [y.text for y in group.generations] == [f"{problem.id}{letter}" for letter in "xyz?"]
        for y in group.generations:
            assert y.token_ids.tolist() == ids(y.text + STOP)
            assert y.loss_mask.tolist() == [True] * 3 and y.logprobs.tolist() == [-1.0] * 3
            assert (y.finish_reason, y.turns, set(y.weight_versions)) == ("stop", (y.text,), {0})
    (requests,) = sampler.calls
    for problem, request in zip(PROBLEMS, requests, strict=True):
        assert (request.problem_id, request.max_tokens) == (problem.id, MAX_TOKENS)
        assert request.seeds.tolist() == generation_seeds(0, problem, 4).tolist()


def test_seeds_depend_only_on_the_sampling_seed_problem_and_occurrence():
    """The seeds must not change between versions, so that a resumed run samples the same tokens."""
    p, q, again = Problem("p", "", ""), Problem("q", "", ""), Problem("p", "", "", occurrence=1)
    seeds = generation_seeds(0, p, 3)
    assert seeds.tolist() == [3361635020, 2075578834, 2972712664] and seeds.dtype == np.uint32
    assert generation_seeds(0, p, 5)[:3].tolist() == seeds.tolist()
    others = [generation_seeds(1, p, 3), generation_seeds(0, q, 3), generation_seeds(0, again, 3)]
    assert len({*seeds.tolist()} | {seed for other in others for seed in other.tolist()}) == 4 * 3


def test_groups_are_yielded_as_soon_as_they_are_complete():
    """The sampler yields the completions of the second problem only after the first group has been read."""

    async def main() -> list[str]:
        is_read, seen = asyncio.Event(), []

        class Held(Recording):
            async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
                async for completion in super().sample(requests, sampling):
                    if completion.request == 1:
                        await is_read.wait()
                    yield completion

        async for group in open_rollouts(Held(lambda *_: "a")).generate(PROBLEMS, 2, Sampling(MAX_TOKENS)):
            seen.append(group.problem.id)
            is_read.set()
        return seen

    assert asyncio.run(main()) == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_the_sampler_ends_before_the_reader(how: str):
    async def main() -> None:
        happened = []

        class Slow(Recording):
            async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
                try:
                    yield self.completion(0, 0, "a")
                    happened.append("waits")
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)  # As if the sampler waited for a thread.
                    happened.append("sampler")

        async def read() -> None:
            groups = open_rollouts(Slow(lambda *_: "a")).generate(PROBLEMS, 1, Sampling(MAX_TOKENS))
            try:
                async for _ in groups:
                    if how == "closed":
                        break
            finally:
                await groups.aclose()
                happened.append("reader")

        task = asyncio.create_task(read())
        if how == "closed":
            await task
        else:
            await until(lambda: "waits" in happened)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert happened[-2:] == ["sampler", "reader"]

    asyncio.run(main())


def test_missing_completions_raise_an_error():
    class Forgetful(Recording):
        async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            async for completion in super().sample(requests, sampling):
                if (completion.request, completion.index) != (1, 2):
                    yield completion

    with pytest.raises(RuntimeError, match="1 completions of problem 'b' are missing"):
        generate(Forgetful(lambda *_: "a"), ByLetter(), 3)


def test_a_repeated_completion_does_not_replace_another():
    class Repeating(Recording):
        async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            async for completion in super().sample(requests, sampling):
                yield completion
                yield self.completion(completion.request, completion.index, "b")

    for group in generate(Repeating(lambda request, index: "xyz"[index]), ByLetter(), 3):
        assert [y.text for y in group.generations] == ["x", "y", "z"]


def test_generation_ends_if_the_sampler_is_cancelled():
    class Cancelled(Recording):
        async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            yield self.completion(0, 0, "a")
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        generate(Cancelled(lambda *_: "a"), ByLetter(), 3)


def test_single_turn_tasks_start_one_asyncio_task_per_prompt():
    """A task per generation took two thirds of the CPU time of evaluations with many short responses."""
    started = []

    def start(loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> asyncio.Task[Any]:
        started.append(work)
        return asyncio.Task(work, loop=loop, **settings)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(start)
        groups = open_rollouts(Recording(lambda *_: "a")).generate(PROBLEMS, 64, Sampling(MAX_TOKENS))
        assert [len(group.generations) async for group in groups] == [64] * 3
        assert len(started) == len(PROBLEMS) + 1  # The last task is the call of the sampler.

    asyncio.run(main())


def test_without_problems_nothing_is_sampled():
    sampler = Recording(lambda *_: "a")
    assert collect(open_rollouts(sampler), [], 4, Sampling(MAX_TOKENS)) == [] and not sampler.calls


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}x{{ message['content'] }}y{% endfor %}"
    "{% if add_generation_prompt %}z{% endif %}"
)


def test_chat_prompts_use_the_chat_template_of_the_tokenizer():
    tokenizer = build_character_tokenizer(ALPHABET + "u")
    tokenizer.chat_template = CHAT_TEMPLATE
    problems = [Problem("chat", "ab", "", chat=True), Problem("plain", "ab", "")]
    sampler = Recording(lambda *_: "c")
    rollouts = Rollouts(sampler, tokenizer, ByLetter(), max_prompt_tokens=8)
    prompts = {group.problem.id: group.prompt_ids for group in collect(rollouts, problems, 1, Sampling(MAX_TOKENS))}
    assert {name: tokenizer.decode(prompt) for name, prompt in prompts.items()} == {"chat": "uxabyz", "plain": "ab"}
    # The tokens of the template count towards the prompt length.
    assert drop_long_prompts(problems, tokenizer, max_tokens=5, vocab_size=12) == ([problems[1]], 1)


def test_a_chat_prompt_without_a_chat_template_raises_an_error():
    tokenizer = build_character_tokenizer(ALPHABET)
    rollouts = Rollouts(Recording(lambda *_: "c"), tokenizer, ByLetter(), max_prompt_tokens=8)
    with pytest.raises(ValueError, match=r"tokenizer has no chat template.*task\.options\.template"):
        collect(rollouts, [Problem("chat", "ab", "", chat=True)], 1, Sampling(MAX_TOKENS))


@pytest.mark.parametrize("token", [-1, 11])
def test_completions_with_tokens_outside_the_embedding_raise_an_error(token: int):
    class Inventing(Recording):
        def completion(self, place: int, index: int, text: str) -> Completion:
            ids = np.array([token, 1], np.int32)
            return Completion(place, index, ids, np.full(2, -1, np.float32), "stop", np.zeros(2, np.int32))

    sampler = Inventing(lambda *_: "a")
    rollouts = Rollouts(sampler, sampler.tokenizer, ByLetter(), 8, vocab_size=11)
    with pytest.raises(ValueError, match="outside the range 0 to 10 for problem 'a'"):
        collect(rollouts, PROBLEMS, 1, Sampling(MAX_TOKENS))
