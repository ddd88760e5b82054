"""What a compiled program does inside its loops, read off its text."""

import re

COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def loop_bodies(text: str) -> list[str]:
    """Of each loop the text of its body and of all computations that the body uses."""
    computations = dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))

    def everything_in(name: str) -> str:
        seen, waiting = set(), [name]
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += [used for used in re.findall(r"%([\w.-]+)", computations[one]) if used in computations]
        return "\n".join(computations[one] for one in seen)

    return [everything_in(body) for body in re.findall(r"body=%([\w.-]+)", text)]
