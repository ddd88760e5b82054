"""Set reinforcement learning for language models in JAX (Poly-EPO).

`from poly_epo_jax import get_config, run` provides training from Python; see from_python.py. Both are imported on first
access, so that importing the package is fast.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poly_epo_jax.from_python import get_config, run

# Only the tokenizers of transformers are used, so its advice to install PyTorch is disabled.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__all__ = ["get_config", "run"]


def __getattr__(name: str) -> Any:
    """Imports `get_config` and `run` on first access, because reports and graders do not require JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from poly_epo_jax import from_python

    return getattr(from_python, name)
