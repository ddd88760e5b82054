"""Set reinforcement learning for language models in JAX (Poly-EPO).

`from poly_epo_jax import get_config, run` provides training from Python; see from_python.py. Attributes are computed on
first access, so that importing the package is fast, and works without the packages that training requires.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poly_epo_jax.from_python import get_config, run

    __version__: str

# Only the tokenizers of transformers are used, so its advice to install PyTorch is disabled.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__all__ = ["__version__", "get_config", "run"]

# While Python locates the module of python -m poly_epo_jax.COMMAND. Commands of other packages keep their tracebacks.
if sys.argv[:1] == ["-m"] and any(argument.startswith(f"{__name__}.") for argument in sys.orig_argv):
    from poly_epo_jax.system.missing_packages import report_missing_packages

    report_missing_packages()


def __getattr__(name: str) -> Any:
    """Returns the installed version, or imports `get_config` or `run`. Reports and graders do not require JAX."""
    if name == "__version__":
        from poly_epo_jax.system.versions import installed_version

        return installed_version(__name__) or "unknown"
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from poly_epo_jax import from_python
    except ModuleNotFoundError as error:
        from poly_epo_jax.system.missing_packages import explain_missing_package

        raise ImportError(explain_missing_package(error)) from None
    return getattr(from_python, name)
