"""Who clusters the generations of a prompt: a name to a constructor each, which takes the task and `config.judge`."""

from collections.abc import Callable

from ml_collections import ConfigDict

from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.types import Judge, Task

JUDGES: dict[str, Callable[[Task, ConfigDict], Judge]] = {
    "exact": lambda task, section: ExactJudge(task),
    "llm": lambda task, section: LLMJudge(
        **{key: value for key, value in section.items() if key not in ("name", "max_failed_share")}
    ),
}
