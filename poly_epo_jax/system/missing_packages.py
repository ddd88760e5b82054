"""Error message for packages that are not installed. Commands print it in one line instead of a traceback."""

import sys
from types import TracebackType


def explain_missing_package(error: ModuleNotFoundError) -> str:
    """Returns a sentence with the name of the missing package, and the command that installs it."""
    package = (error.name or "a package").partition(".")[0]
    return (
        f"training, evaluation and reports need more packages ({package} is missing); install them with: "
        "pip install 'poly-epo-jax[train]'"
    )


def report_missing_packages() -> None:
    """Makes this process print `explain_missing_package` if a package is missing. Only commands call this function."""

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, ModuleNotFoundError):
            print(f"Error: {explain_missing_package(error)}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = report
