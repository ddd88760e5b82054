"""Scripts that grade answers in worker processes, and their versions."""

from pathlib import Path
from typing import NamedTuple

from poly_epo_jax.system.digests import file_digests, json_digest
from poly_epo_jax.system.versions import installed_version


class Grader(NamedTuple):
    """A script that workers execute to grade answers.

    Attributes:
      package: Distribution that the script requires.
      command: Path of the script, which defines `open_grader`, and the arguments of this function.
      returns: Type of the values that the grader returns, unless they are outcomes.
      modules: Files that determine the outcome in addition to the script.
    """

    package: str
    command: tuple[str, ...]
    returns: type = float
    modules: tuple[Path, ...] = ()

    @property
    def version(self) -> str:
        """The versions of the package and of SymPy, and the digest of the script and `modules`."""
        packages = (f"{name} {installed_version(name)}" for name in (self.package, "sympy"))
        digest = json_digest(file_digests([Path(self.command[0]), *self.modules]))
        return ", ".join((*packages, f"rules {digest[:12]}"))


MATH = Grader(
    "math-verify",
    (str(Path(__file__).with_name("verify_worker.py")),),
    modules=(
        Path(__file__).with_name("answers.py"),
        Path(__file__).with_name("normalization.py"),
        Path(__file__).with_name("answer_names.py"),
        Path(__file__).with_name("answer_rules.py"),
        Path(__file__).with_name("verifier.py"),
    ),
)
"""Compares mathematical answers."""
