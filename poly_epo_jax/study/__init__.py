"""Studies compare methods over learning rates, seeds and tasks that a Python file defines, see docs/study.md."""

from poly_epo_jax.study.spec import (
    PAPER_METHODS as PAPER_METHODS,
    Evaluation as Evaluation,
    Study as Study,
    StudyTask as StudyTask,
)
