"""The judges that cluster the generations of a prompt: what each needs, and how to open it."""

import dataclasses
from collections.abc import Callable

from poly_epo_jax.judges.answer import AnswerJudge
from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.judges.ngrams import NgramsJudge
from poly_epo_jax.types import DEGENERATE_CLUSTER, Group, Judge, Registry, Strategic, Task, Voting


class NoJudge:
    """Does not cluster."""

    async def cluster(self, group: Group) -> None:
        return None


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
    llm=JudgeEntry(LLMJudge, "a language model", needs_url=True, most=DEGENERATE_CLUSTER - 1),
    ngrams=JudgeEntry(NgramsJudge, "pieces of text in common"),
    none=JudgeEntry(lambda task, section: NoJudge(), "no clusters", clusters=False),
)
