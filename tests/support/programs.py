"""Extracts loop bodies and collectives from the text of a compiled program."""

import re
from collections import Counter

COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def loop_bodies(text: str) -> list[str]:
    """Returns, for each loop, the text of its body and of all computations that the body uses."""
    computations = _computations(text)
    return [
        "\n".join(computations[name] for name in _used_by(body, computations))
        for body in re.findall(r"body=%([\w.-]+)", text)
    ]


def collectives_per_pass(text: str) -> Counter[str]:
    """Counts the collectives of each kind in loop bodies and conditions. Each occurrence in the text is counted once.

    Collectives of a nested loop are also counted once per pass of the outer loop, although the nested loop may have
    several iterations.
    """
    computations = _computations(text)
    roots = re.findall(r"(?:body|condition)=%([\w.-]+)", text)
    within = set().union(*(_used_by(name, computations) for name in roots))
    return Counter(kind for name in within for kind in COLLECTIVES.findall(computations[name]))


def _computations(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))


def _used_by(name: str, computations: dict[str, str]) -> set[str]:
    """Returns the names of all computations that a computation uses, including its own name."""
    seen, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += [used for used in re.findall(r"%([\w.-]+)", computations[one]) if used in computations]
    return seen
