"""Studies compare methods over learning rates, seeds and tasks. See docs/how_to/compare_methods.md."""

from poly_epo_jax.study.spec import (
    PAPER_METHODS as PAPER_METHODS,
    Evaluation as Evaluation,
    Study as Study,
    StudyTask as StudyTask,
)
