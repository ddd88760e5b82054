"""Whether the judge's answer about four responses with obvious strategies has the form of a clustering."""

import asyncio
import dataclasses

import numpy as np

from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.doctor.examine import Failed, Missing, Seen, Subject
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.startup.read_config import make_judge
from poly_epo_jax.types import Clustering, Generation, Group, Judge, JudgeFailure, Problem, Served

PROBLEM = Problem("doctor", "What is 1 + 2 + ... + 10? Put the answer inside \\boxed{}.", "55")
RESPONSES = (
    "The sum of the first n numbers is n(n + 1)/2. With n = 10 that is 10 * 11 / 2 = 55. \\boxed{55}",
    "By the formula n(n + 1)/2 for n = 10 we get 110 / 2 = 55. \\boxed{55}",
    "I add one after the other: 1, 3, 6, 10, 15, 21, 28, 36, 45, 55. \\boxed{55}",
    "banana banana banana banana",
)
SECONDS, WAIT_SECONDS = 60.0, 20.0  # for an answer, and for the server to accept connections


def check_judge(subject: Subject) -> Seen:
    """Asks the judge as a run does. How well it clusters is reported, but is no reason to fail."""
    section = subject.config.judge
    if not JUDGES[section.name].needs_url:
        raise Missing(f"judge.name={section.name} is no server")
    judge = make_judge(_impatient(section), subject.task)
    outcome = asyncio.run(_asked(judge, _group()))
    if not isinstance(outcome, Clustering):
        reason = f"{outcome.kind}: {outcome.reason}" if isinstance(outcome, JudgeFailure) else "it gave no clusters"
        raise Failed(f"{section.url} gave no clustering ({reason}); see its log, and judge.options")
    ids = ", ".join(map(str, outcome.ids.tolist()))
    if len(outcome.ids) != len(RESPONSES):
        raise Failed(f"judge.name={section.name} gave clusters {ids} to {len(RESPONSES)} responses; correct it")
    first, second, third, junk = outcome.ids.tolist()
    knows = first == second and len({first, third, junk}) == 3
    opinion = "as expected" if knows else "though the first two share a strategy, and no others do"
    return f"{section.url} put four responses into clusters {ids}, {opinion}", {"clusters": ids}


def _impatient(section: JudgeSection) -> JudgeSection:
    return dataclasses.replace(
        section,
        timeout_seconds=min(section.timeout_seconds, SECONDS),
        wait_seconds=min(section.wait_seconds, WAIT_SECONDS),
    )


def _group() -> Group:
    def generation(text: str) -> Generation:
        ids = np.zeros(1, np.int32)
        return Generation(ids, np.zeros(1, np.float32), np.ones(1, bool), (text,), "stop", 0)

    return Group(PROBLEM, np.zeros(1, np.int32), tuple(map(generation, RESPONSES)))


async def _asked(judge: Judge, group: Group) -> Clustering | JudgeFailure | None:
    if isinstance(judge, Served):
        await judge.wait_until_ready()
    return await judge.cluster(group)
