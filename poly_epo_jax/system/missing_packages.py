"""Error message for packages that are not installed. Commands print it in one line instead of a traceback."""

import json
import sys
from importlib import metadata
from types import TracebackType


def install_command(extra: str) -> str:
    """Returns the command that installs an extra of this package from where the package itself was installed.

    This is a clone, the file of a wheel, or the package index.
    """
    installed = next(iter(metadata.distributions(name="poly-epo-jax")), None)
    origin = json.loads((installed and installed.read_text("direct_url.json")) or "{}")
    if installed is None or "dir_info" in origin:
        return f"pip install --editable '{origin.get('url', '.').removeprefix('file://')}[{extra}]'"
    source = f" @ {origin['url']}" if origin else ""
    return f"pip install 'poly-epo-jax[{extra}]{source}'"


def explain_missing_package(error: ModuleNotFoundError) -> str:
    """Returns a sentence with the name of the missing package, and the command that installs it."""
    package = (error.name or "a package").partition(".")[0]
    return (
        f"training, evaluation and reports need more packages ({package} is missing); install them with: "
        f"{install_command('train')}"
    )


def report_missing_packages() -> None:
    """Makes this process print `explain_missing_package` if a package is missing. Only called for commands."""

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, ModuleNotFoundError):
            print(f"Error: {explain_missing_package(error)}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = report
