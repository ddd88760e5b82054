"""What a compiled program does inside its loops, read from its text."""

import re
from collections import Counter

COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def loop_bodies(text: str) -> list[str]:
    """Of each loop the text of its body and of all computations that the body uses."""
    computations = _computations(text)
    return [
        "\n".join(computations[name] for name in _used_by(body, computations))
        for body in re.findall(r"body=%([\w.-]+)", text)
    ]


def collectives_per_pass(text: str) -> Counter[str]:
    """How many collectives of each kind stand in the loops of a program, in bodies and conditions, each counted once.

    Those of a loop within a loop count as of one pass, though it may make several.
    """
    computations = _computations(text)
    roots = re.findall(r"(?:body|condition)=%([\w.-]+)", text)
    within = set().union(*(_used_by(name, computations) for name in roots))
    return Counter(kind for name in within for kind in COLLECTIVES.findall(computations[name]))


def _computations(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))


def _used_by(name: str, computations: dict[str, str]) -> set[str]:
    """Names of the computations that this one uses, itself among them."""
    seen, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += [used for used in re.findall(r"%([\w.-]+)", computations[one]) if used in computations]
    return seen
