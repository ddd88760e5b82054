r"""One worker of the verifier: reads lines of JSON [gold, answer], writes "right", "wrong" or "timed out" for each.

A program of its own, so that it imports neither this package nor JAX: `python -P verify_worker.py BYTES SECONDS`, its
limits on memory and on the CPU time of one comparison. It grades in its main thread, where math-verify's alarms work.
"""

import functools
import itertools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy import Eq, Expr

ALARM_SECONDS = 2
TINY = 1e-3


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> list[Any]:
    """The answer as SymPy reads it, and as a string."""
    # Plain expressions are LaTeX as well. math-verify's other reader would take the last number in what has none.
    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=ALARM_SECONDS, raise_on_error=True)


@timeout(ALARM_SECONDS)
def agree_in_scale(gold: Any, answer: Any) -> bool:
    """False for tiny numbers that differ: math-verify compares to an absolute 1e-6, by which 1e-9 would equal 1e-30."""
    sides = [side.rhs if isinstance(side, Eq) else side for side in (gold, answer)]
    if not all(isinstance(side, Expr) and side.is_number for side in sides):
        return True
    gold, answer = (side.doit() for side in sides)
    size = abs(gold.evalf())
    return bool(size == 0 or size > TINY or abs((gold - answer).evalf()) <= 1e-3 * size)


def grade(gold: str, answer: str) -> str:
    """Tries every reading of both; what cannot be read or compared is not equal, and SymPy raises all sorts there."""
    outcome = "wrong"
    try:
        pairs = list(itertools.product(parsed(gold), parsed(answer)))
    except TimeoutException:
        return "timed out"
    except MemoryError:
        raise
    except Exception:
        return "wrong"
    for pair in pairs:
        try:
            equal = verify(*pair, allow_set_relation_comp=True, timeout_seconds=ALARM_SECONDS, raise_on_error=True)
            if equal and agree_in_scale(*pair):
                return "right"
        except TimeoutException:
            outcome = "timed out"
        except MemoryError:
            raise
        except Exception:
            continue
    return outcome


def main() -> None:
    memory_bytes, cpu_seconds = int(sys.argv[1]), float(sys.argv[2])
    if sys.platform == "linux":  # elsewhere it cannot be lowered
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    # What libraries print must not pass for a reply, and their complaints about odd answers are of no use.
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    grade("1", "1")
    os.write(replies, b'"ready"\n')
    os.dup2(nowhere, 2)
    for line in sys.stdin:
        # Should the parent be gone, no one else would end a comparison that never returns: this signal does.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        outcome = grade(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, f"{json.dumps(outcome)}\n".encode())


if __name__ == "__main__":
    main()
