"""The outcome of one attempt of a fault-injection test."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attempt.

    Attributes:
      kind: Group of the attempt in the summary.
      held: Whether the package behaved as guaranteed.
      what: Description of the attempt with the information required to reproduce it.
    """

    kind: str
    held: bool
    what: str
