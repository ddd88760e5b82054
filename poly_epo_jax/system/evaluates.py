"""Marks the tasks and threads of evaluations during training, whose retries are counted apart."""

from contextvars import ContextVar

EVALUATES: ContextVar[bool] = ContextVar("EVALUATES", default=False)
"""True in the tasks and threads that an evaluation during training has started."""
