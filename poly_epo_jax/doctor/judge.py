"""Checks that the judge returns a valid clustering of four responses with obvious strategies."""

import asyncio
import dataclasses

import numpy as np

from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.doctor.runner import CheckResult, Failed, RunContext, Skipped
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.rollouts.returned_values import checked_clustering
from poly_epo_jax.startup.read_config import make_judge
from poly_epo_jax.types import Clustering, Generation, Group, Judge, JudgeFailure, Problem, ServerBacked

PROBLEM = Problem("doctor", "What is 1 + 2 + ... + 10? Put the answer inside \\boxed{}.", "55")
RESPONSES = (
    "The sum of the first n numbers is n(n + 1)/2. With n = 10 that is 10 * 11 / 2 = 55. \\boxed{55}",
    "By the formula n(n + 1)/2 for n = 10 we get 110 / 2 = 55. \\boxed{55}",
    "I add one after the other: 1, 3, 6, 10, 15, 21, 28, 36, 45, 55. \\boxed{55}",
    "banana banana banana banana",
)
# Time limits in seconds for a reply, and for a server that does not accept connections.
TIMEOUT_SECONDS, WAIT_SECONDS = 60.0, 20.0


def check_judge(run: RunContext) -> CheckResult:
    """Queries the judge like a run does. The quality of the clustering is reported, but does not affect the status."""
    section = run.config.judge
    if not JUDGES[section.name].needs_url:
        raise Skipped(f"judge.name={section.name} is not a server")
    judge = make_judge(_with_short_timeouts(section), run.task)
    outcome = asyncio.run(_cluster(judge, _group()))
    if not isinstance(outcome, Clustering):
        reason = f"{outcome.kind}: {outcome.reason}" if isinstance(outcome, JudgeFailure) else "no clusters"
        raise Failed(f"{section.url} returned no clustering ({reason}); see its log, and check judge.options")
    ids = ", ".join(map(str, outcome.ids.tolist()))
    first, second, third, degenerate = outcome.ids.tolist()
    is_expected = first == second and len({first, third, degenerate}) == 3
    assessment = "as expected" if is_expected else "but only the first two share a strategy"
    return f"{section.url} assigned four responses to clusters {ids}, {assessment}", {"clusters": ids}


def _with_short_timeouts(section: JudgeSection) -> JudgeSection:
    return dataclasses.replace(
        section,
        timeout_seconds=min(section.timeout_seconds, TIMEOUT_SECONDS),
        wait_seconds=min(section.wait_seconds, WAIT_SECONDS),
    )


def _group() -> Group:
    def generation(text: str) -> Generation:
        ids = np.zeros(1, np.int32)
        return Generation(ids, np.zeros(1, np.float32), np.ones(1, bool), (text,), "stop", np.zeros(1, np.int32))

    return Group(PROBLEM, np.zeros(1, np.int32), tuple(map(generation, RESPONSES)))


async def _cluster(judge: Judge, group: Group) -> Clustering | JudgeFailure | None:
    if isinstance(judge, ServerBacked):
        await judge.wait_until_ready()
    return checked_clustering(judge, group, await judge.cluster(group))
