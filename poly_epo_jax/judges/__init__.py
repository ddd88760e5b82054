"""Who clusters the generations of a prompt: a name to what makes a judge of the task and `config.judge`.

Further arguments are `judge.options`.
"""

from collections.abc import Callable

from poly_epo_jax.config import JudgeSection
from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.registry import Registry
from poly_epo_jax.types import Judge, Task


def _exact(task: Task, section: JudgeSection) -> ExactJudge:
    return ExactJudge(task)


def _llm(
    task: Task,
    section: JudgeSection,
    *,
    temperature: float = 0.7,
    max_tokens: int = 2048,
    attempts: int = 3,
    prompt_file: str = "",
    max_response_chars: int = 20_000,
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
    )


JUDGES: Registry[Callable[..., Judge]] = Registry(exact=_exact, llm=_llm)
