"""The judges that cluster the generations of a prompt: what each needs, and how to open it."""

import dataclasses
from collections.abc import Callable
from typing import Annotated

from poly_epo_jax.checks import Range
from poly_epo_jax.config import JudgeSection
from poly_epo_jax.judges.answer import AnswerJudge
from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.judges.ngrams import NgramsJudge
from poly_epo_jax.judges.none import NoJudge
from poly_epo_jax.registry import Registry
from poly_epo_jax.types import DEGENERATE_CLUSTER, Judge, Strategic, Task, Voting


def _llm(
    task: Task,
    section: JudgeSection,
    *,
    temperature: Annotated[float, Range(0, 2)] = 0.7,
    max_tokens: Annotated[int, Range(1, 2**20)] = 2048,
    attempts: Annotated[int, Range(1, 100)] = 3,
    prompt_file: str = "",
    max_response_chars: Annotated[int, Range(2, 10**7)] = 20_000,
    context_tokens: Annotated[int, Range(0, 2**30)] = 0,
) -> LLMJudge:
    return LLMJudge(
        url=section.url,
        model=section.model,
        api_key_env=section.api_key_env,
        max_concurrent=section.max_concurrent,
        timeout_seconds=section.timeout_seconds,
        wait_seconds=section.wait_seconds,
        temperature=temperature,
        max_tokens=max_tokens,
        attempts=attempts,
        prompt_file=prompt_file,
        max_response_chars=max_response_chars,
        context_tokens=context_tokens,
    )


def _ngrams(
    task: Task,
    section: JudgeSection,
    *,
    length: Annotated[int, Range(1, 16)] = 3,
    dimensions: Annotated[int, Range(2, 65536)] = 256,
    threshold: Annotated[float, Range(0, 1)] = 1.0,
) -> NgramsJudge:
    return NgramsJudge(length, dimensions, threshold)


@dataclasses.dataclass(frozen=True)
class JudgeEntry:
    """A judge that can be named in judge.name.

    Args:
      open: (task, section `judge` of the configuration, **judge.options) -> judge.
      title: its name in prose.
      task: the protocol that the task must meet.
      needs_url: whether its server must be named in judge.url.
      clusters: whether its clusters mean anything. If they do not, no advantage estimator may read them.
      most: the most generations of a prompt that it can cluster; None: any number.
    """

    open: Callable[..., Judge]
    title: str
    task: type = Task
    needs_url: bool = False
    clusters: bool = True
    most: int | None = None


JUDGES: Registry[JudgeEntry] = Registry(
    exact=JudgeEntry(lambda task, section: ExactJudge(task), "the task's own strategies", task=Strategic),
    answer=JudgeEntry(lambda task, section: AnswerJudge(task), "final answers", task=Voting),
    llm=JudgeEntry(_llm, "a language model", needs_url=True, most=DEGENERATE_CLUSTER - 1),
    ngrams=JudgeEntry(_ngrams, "pieces of text in common"),
    none=JudgeEntry(lambda task, section: NoJudge(), "no clusters", clusters=False),
)
