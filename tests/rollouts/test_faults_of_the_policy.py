"""A policy that provokes failures reads them as text, or has reward 0. It is trained on, and never gains by failing."""

import dataclasses
import json
import string
from typing import Any

from fakes import ByLetter, Scripted, collect

from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.tasks.tool_calls import answer_tool_calls
from poly_epo_jax.types import Completion, Generation, Outcome, Problem, Request, Sampling


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'repeat', 'arguments': arguments})}</tool_call>"


READ_AS_TEXT = {
    "malformed": "<tool_call>{</tool_call>",
    "unclosed": "<tool_call>" + call(text="a", times=1),
    "unknown tool": call(text="a", times=1).replace("repeat", "delete"),
    "wrong arguments": call(text="a", count=1),
    "wrong type": call(text="a", times="b"),
    "too large": call(text="a", times=10**30),
    "too much memory": call(text="a", times=10**15),
    "rejected": call(text="a", times=-1),
}
WITHOUT_REWARD = {
    "long answer": call(text="ab", times=100_000),
    "long turn": "a" * 300,
    "no end": call(text="a", times=1),
}
CHANGED = {"surrogate": call(text="\ud83d", times=1)}
TURNS = READ_AS_TEXT | WITHOUT_REWARD | CHANGED
PROBLEMS = [Problem(name, f"{name}:", "") for name in TURNS]
MAX_TOKENS = 250


def repeat(text: str, times: int) -> str:
    if times < 0:
        raise ValueError("times is negative.")
    return text * times


class Tools(ByLetter):
    """Episodes that always have reward 1, so that a reward of 0 is due to the rules for all episodes."""

    def start(self, problem: Problem, seed: int) -> Any:
        class Episode:
            async def reply(self, generation: Generation) -> str | None:
                return answer_tool_calls(generation.turns[-1], {"repeat": repeat}).text

            async def close(self) -> Outcome:
                return Outcome(1.0, "s")

        return Episode()


class Provoking(Scripted):
    """Writes the turn of the problem, and then "done" unless the problem is "no end"."""

    def __init__(self):
        def say(request: Request, index: int) -> str:
            is_first = request.max_tokens == MAX_TOKENS or request.problem_id == "no end"
            return TURNS[request.problem_id] if is_first else "done"

        super().__init__(say, string.ascii_letters + string.digits + string.punctuation + " \n\ufffd")

    def completion(self, place: int, index: int, text: str) -> Completion:
        whole = super().completion(place, index, text)
        if len(whole.token_ids) <= MAX_TOKENS:
            return whole
        cut = {name: getattr(whole, name)[:MAX_TOKENS] for name in ("token_ids", "logprobs", "weight_versions")}
        return dataclasses.replace(whole, finish_reason="length", **cut)


def test_faults_of_the_policy_are_read_or_not_rewarded_and_always_trained_on():
    sampler = Provoking()
    rollouts = Rollouts(sampler, sampler.tokenizer, Tools(), 20)
    for group in collect(rollouts, PROBLEMS, 2, Sampling(MAX_TOKENS, max_turns=2)):
        assert not group.failures and len(group.generations) == 2
        for y in group.generations:
            assert y.outcome is not None and y.loss_mask.any()
            if (name := group.problem.id) in WITHOUT_REWARD:
                assert y.outcome.reward == 0 and y.outcome.correct is False and y.finish_reason == "length"
            else:
                assert y.outcome.reward == 1 and y.turns[2] == "done"
                assert y.turns[1].startswith("<tool_response>\n" + ("\ufffd" if name in CHANGED else "Error: ")), name
    assert rollouts.metrics() == {"rollouts/replaced_characters": 2.0}
    assert rollouts.environments is not None
    assert rollouts.environments.metrics() == {"environment/retries": 0, "environment/no_room": 4}
