"""Registry of the judges, which cluster the generations of a prompt."""

import dataclasses
from collections.abc import Callable
from types import UnionType

from poly_epo_jax.judges.answer import AnswerJudge
from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.judges.ngrams import NgramsJudge
from poly_epo_jax.registry import Registry
from poly_epo_jax.types import (
    DEGENERATE_CLUSTER,
    Group,
    HasAnswers,
    Identified,
    Interactive,
    Judge,
    ServerBacked,
    Strategic,
    Task,
)


class NoJudge:
    """A judge that does not cluster."""

    async def cluster(self, group: Group) -> None:
        """Returns None."""


NOT_CLUSTERING: set[type] = {NoJudge}
"""Classes of judges that may return None. `make_judge` adds the judges of entries with `clusters=False`."""


@dataclasses.dataclass(frozen=True)
class JudgeEntry:
    """An entry of `JUDGES`, selected by `judge.name`.

    Attributes:
      open: Function `(task, section, **options) -> judge`, where `section` is the `judge` section of the configuration
        and `options` are `judge.options`.
      title: Name of the judge in prose.
      task: Protocol that the task must implement, or a union of protocols.
      needs_url: Whether `judge.url` is required.
      clusters: Whether the judge clusters. If False, it may return None, and methods that read clusters are rejected.
      features: Names of the features that the judge adds. If None, they are only checked when the judge has added them.
      max_generations: Maximum number of generations of a prompt that the judge can cluster. If None, there is no limit.
    """

    open: Callable[..., Judge]
    title: str
    task: type | UnionType = Task
    needs_url: bool = False
    clusters: bool = True
    features: tuple[str, ...] | None = None
    max_generations: int | None = None


JUDGES: Registry[JudgeEntry] = Registry(
    exact=JudgeEntry(ExactJudge, "the task's own strategies", task=Strategic | Interactive, features=()),
    answer=JudgeEntry(lambda task, section: AnswerJudge(task), "final answers", task=HasAnswers, features=()),
    llm=JudgeEntry(LLMJudge, "a language model", needs_url=True, features=(), max_generations=DEGENERATE_CLUSTER - 1),
    ngrams=JudgeEntry(NgramsJudge, "shared character n-grams", features=("embeddings",)),
    none=JudgeEntry(lambda task, section: NoJudge(), "no clusters", clusters=False, features=()),
)
"""Judges by the name that `judge.name` selects."""


async def judge_identity(judge: Judge) -> dict[str, str]:
    """Waits until the server of a judge responds, and returns the name of its model and the digests of its files.

    Args:
      judge: The judge.

    Returns:
      Names and SHA-256 digests by configuration key, such as `judge.model`. Empty for judges that are not `Identified`.

    Raises:
      ServerError: If the server does not respond within `judge.wait_seconds`, or does not list a model.
    """
    if isinstance(judge, ServerBacked):
        await judge.wait_until_ready()
    return await judge.identity() if isinstance(judge, Identified) else {}
