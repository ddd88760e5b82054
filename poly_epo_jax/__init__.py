"""Set reinforcement learning for language models in JAX (Poly-EPO).

`from poly_epo_jax import get_config, run` trains from Python, see from_python.py. Importing the package loads nothing.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poly_epo_jax.from_python import get_config, run

# Of transformers only the tokenizers are used, so it need not advise to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__all__ = ["get_config", "run"]


def __getattr__(name: str) -> Any:
    """What trains, loaded when it is first asked for: reports and graders need no JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from poly_epo_jax import from_python

    return getattr(from_python, name)
