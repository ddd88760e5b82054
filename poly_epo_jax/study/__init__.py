"""Studies compare methods over learning rates, seeds and tasks that a Python file defines, see docs/study.md."""

from poly_epo_jax.study.spec import PAPER_METHODS as PAPER_METHODS
from poly_epo_jax.study.spec import Evaluation as Evaluation
from poly_epo_jax.study.spec import Study as Study
from poly_epo_jax.study.spec import Task as Task
