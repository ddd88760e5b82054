"""The outcome of one attempt to break something."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """`kind` groups attempts in the summary; `what` says enough of a failure to repeat it."""

    kind: str
    held: bool
    what: str
