"""Tests episodes with state: exact tokens, separate states, limits, and interruptions."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from episodes import ALPHABET, PROBLEMS, ByHash, Concurrent, N, Sums, SumTask, graded, play, spoken
from fakes import PATIENCE, ByLetter, collect, until

from poly_epo_jax.rollouts import environments, turn_queue
from poly_epo_jax.rollouts.groups import Rollouts, generation_seeds
from poly_epo_jax.types import Generation, Group, Interactive, Outcome, Problem, Request, Rewarded, Sampling


def replayed(problem: Problem, seed: int) -> tuple[list[int], list[float], list[bool], float]:
    """Returns tokens, log-probabilities, mask and sum of an episode, without the code of the package."""
    encode = lambda text: [ALPHABET.index(letter) + 2 for letter in text]  # noqa: E731
    total = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]) % 10
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    for turn in range(100):
        turn_seed = int(np.random.SeedSequence([seed, 2 * turn]).generate_state(1)[0]) if turn else seed
        letter, values = spoken(np.array(encode(problem.prompt) + ids), turn_seed)
        ids, logprobs, mask = [*ids, *letter.tolist()], [*logprobs, *values.tolist()], [*mask, True, True]
        total += int(letter[0]) - 1
        if total % 4 == 0 or total > 40:
            return ids, logprobs, mask, total
        reply = encode(f"?{total}")
        ids, logprobs, mask = ids + reply, logprobs + [0.0] * len(reply), mask + [False] * len(reply)
    raise AssertionError


@pytest.mark.parametrize("sampler", [ByHash, Concurrent])
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_episodes_equal_an_independent_replay(sampler: type[ByHash], delay: float):
    """Tokens do not depend on the time that replies take, or on the requests that are sampled together."""
    task = SumTask(delay)
    groups = play(task, sampler(), max_tokens=500)
    turns = []
    for group in groups:
        assert not group.failures and len(group.generations) == N
        for y, seed in zip(group.generations, generation_seeds(0, group.problem, N).tolist(), strict=True):
            ids, logprobs, mask, total = replayed(group.problem, seed)
            assert y.token_ids.tolist() == ids and y.loss_mask.tolist() == mask
            np.testing.assert_array_equal(y.logprobs, np.array(logprobs, np.float32))
            assert y.outcome == Outcome(float(total % 4 == 0), y.turns[0], metrics={"sum": float(total)})
            assert y.finish_reason == "stop" and y.text == "".join(y.turns)
            turns.append(len(y.turns))
    assert min(turns) == 1 and max(turns) >= 5 and max(turns) % 2
    assert [episode.closed for episode in task.episodes] == [1] * len(PROBLEMS) * N


def test_generations_do_not_wait_for_turns_of_other_problems():
    """With concurrent calls, the episodes of a problem end while the sampler holds the first turn of another."""

    async def main() -> list[str]:
        is_read, seen = asyncio.Event(), []

        class Held(Concurrent):
            async def sample(self, requests: Sequence[Request], sampling: Sampling):
                async for completion in super().sample(requests, sampling):
                    if requests[completion.request].problem_id == "c":
                        await is_read.wait()
                    yield completion

        sampler = Held()
        rollouts = Rollouts(sampler, sampler.tokenizer, SumTask(), 8)
        async for group in rollouts.generate(PROBLEMS, N, Sampling(500)):
            seen.append(group.problem.id)
            if len(seen) == 2:
                is_read.set()
        return seen

    assert asyncio.run(main())[2] == "c"


def test_rewards_and_strategies_are_those_of_the_outcomes():
    task = SumTask()
    assert isinstance(task, Interactive) and not isinstance(task, Rewarded)
    for one in graded(play(task, max_tokens=500), task):
        first = [y.turns[0] for y in one.group.generations]
        assert [ids == one.clustering.ids[0] for ids in one.clustering.ids] == [letter == first[0] for letter in first]
        assert one.rewards.tolist() == [y.outcome.reward for y in one.group.generations]
        np.testing.assert_array_equal(one.correct, one.rewards == 1)


class Sure(SumTask):
    """A task whose episodes have the best possible outcome, also if they do not end."""

    def start(self, problem: Problem, seed: int) -> Any:
        class Episode(Sums):
            async def close(self) -> Outcome:
                return Outcome(1.0, "s", True, {"sum": 1.0})

        return Episode(self, seed)


@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"max_tokens": 9}])
def test_unfinished_episodes_have_reward_0_and_are_trained_on(limit: dict[str, Any]):
    task = Sure()
    settings: dict[str, Any] = {"max_tokens": 500} | limit
    groups = play(task, **settings)
    complete = play(task, max_tokens=500)
    reasons = set()
    for one, whole in zip(graded(groups, task), complete, strict=True):
        for y, reward, correct, longer in zip(
            one.group.generations, one.rewards, one.correct, whole.generations, strict=True
        ):
            reasons.add(y.finish_reason)
            assert longer.token_ids[: len(y.token_ids)].tolist() == y.token_ids.tolist()
            assert (reward, correct) == ((1, True) if y.finish_reason == "stop" else (0, False))
            assert (y.finish_reason == "stop") == (y.token_ids.tolist() == longer.token_ids.tolist())
            assert len(y.turns) % 2 and y.outcome is not None and y.outcome.strategy == "s"
            assert len(y.turns) <= 2 * limit.get("max_turns", 99) - 1 and len(y.token_ids) <= limit.get(
                "max_tokens", 99
            )
    assert reasons == {"stop", "length"}


class Wordy(SumTask):
    """Declares a maximum length of replies that replies of two digits exceed."""

    max_reply_tokens: int | None = 2


def test_replies_longer_than_declared_are_failures_of_the_environment():
    for group, whole in zip(play(Wordy(), max_tokens=500), play(SumTask(), max_tokens=500), strict=True):
        long = [index for index, y in enumerate(whole.generations) if any(len(reply) > 2 for reply in y.turns[1::2])]
        assert long and sorted(group.failures) == long
        for failure in group.failures.values():
            assert failure.kind == "long" and "max_reply_tokens=2" in failure.reason


@pytest.mark.parametrize("limit", [0, True, "2"])
def test_an_invalid_maximum_length_of_replies_is_refused(limit: Any):
    task = Wordy()
    task.max_reply_tokens = limit
    with pytest.raises(ValueError, match=r"Wordy\.max_reply_tokens is .*positive integer"):
        play(task)


@pytest.mark.parametrize(("limit", "is_reported"), [({"max_turns": 2}, True), ({"max_tokens": 500}, False)])
def test_episodes_without_room_are_counted_and_reported(
    limit: dict[str, Any], is_reported: bool, monkeypatch: pytest.MonkeyPatch
):
    warnings, sampler = list[str](), ByHash()
    monkeypatch.setattr(turn_queue, "warn_repeatedly", lambda kind, text: warnings.append(text))
    rollouts = Rollouts(sampler, sampler.tokenizer, Sure(), 8)
    groups = collect(rollouts, PROBLEMS, N, Sampling(**dict[str, Any]({"max_tokens": 500} | limit)))
    count = sum(y.finish_reason == "length" for group in groups for y in group.generations)
    assert rollouts.environments is not None and (count > 0) == is_reported
    assert rollouts.environments.metrics()["environment/no_room"] == count
    assert len(warnings) == is_reported
    assert all(f"{count} of 24" in text and "sampling.max_turns=2" in text for text in warnings)


def test_slow_episodes_do_not_delay_others_of_a_serial_sampler(monkeypatch: pytest.MonkeyPatch):
    """The episodes of two problems end while those of the third wait. Tokens are the same as without waiting."""
    monkeypatch.setattr(turn_queue, "QUIET_SECONDS", 0.0)

    async def main() -> list[Group]:
        is_read, seen, loop = asyncio.Event(), [], asyncio.get_running_loop()

        class Slow(SumTask):
            def start(self, problem: Problem, seed: int) -> Any:
                class Episode(Sums):
                    async def reply(self, generation: Generation) -> str | None:
                        if problem.id == "c":
                            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(is_read.wait(), loop))
                        return await super().reply(generation)

                return Episode(self, seed)

        class Serial(ByHash):
            is_busy = False

            async def sample(self, requests: Sequence[Request], sampling: Sampling):
                assert not self.is_busy
                self.is_busy = True
                async for completion in super().sample(requests, sampling):
                    await asyncio.sleep(0)
                    yield completion
                self.is_busy = False

        sampler = Serial()
        async for group in Rollouts(sampler, sampler.tokenizer, Slow(), 8).generate(PROBLEMS, N, Sampling(500)):
            seen.append(group)
            if len(seen) == 2:
                is_read.set()
        return seen

    groups = asyncio.run(main())
    assert groups[2].problem.id == "c"
    expected = {group.problem.id: group for group in play(SumTask(), max_tokens=500)}
    for group in groups:
        for y, other in zip(group.generations, expected[group.problem.id].generations, strict=True):
            assert y.token_ids.tolist() == other.token_ids.tolist() and y.logprobs.tolist() == other.logprobs.tolist()


@pytest.mark.parametrize("how", ["closed", "cancelled", "sampler fails"])
def test_all_episodes_are_closed_once_when_generation_ends_early(how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environments, "CLEANUP_SECONDS", PATIENCE)

    async def main() -> SumTask:
        class Waiting(SumTask):
            async def pause(self) -> None:
                if self.delay:
                    await asyncio.Event().wait()

        class Failing(ByHash):
            async def sample(self, requests: Sequence[Request], sampling: Sampling):
                if how == "sampler fails" and len(requests[0].seeds) == 1:
                    raise OSError("out of memory")
                async for completion in super().sample(requests, sampling):
                    yield completion

        task, sampler = Waiting(), Failing()
        task.delay = float(how == "cancelled")
        groups = Rollouts(sampler, sampler.tokenizer, task, 8).generate(PROBLEMS, N, Sampling(500))

        async def read() -> None:
            async for _ in groups:
                break
            await groups.aclose()

        reading = asyncio.create_task(read())
        if how == "cancelled":
            await until(lambda: len(task.episodes) == 3 * N)
            task.delay = 0.0
            reading.cancel()
        results = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(results[0], {"cancelled": asyncio.CancelledError, "sampler fails": OSError}.get(how, object))
        return task

    task = asyncio.run(main())
    assert len(task.episodes) == 3 * N and {episode.closed for episode in task.episodes} == {1}


def test_single_turn_tasks_start_no_episodes():
    groups = play(ByLetter())
    assert all(y.outcome is None and len(y.turns) == 1 for group in groups for y in group.generations)
