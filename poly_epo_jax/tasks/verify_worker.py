r"""One worker of the verifier: reads lines of JSON [gold, answer], writes "right", "wrong" or "timed out" for each.

A program of its own, so that it imports neither this package nor JAX: `python -P verify_worker.py BYTES SECONDS`, its
memory and the CPU time of one comparison. It grades in its main thread, as no other can be interrupted.
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
from sympy import Eq, Expr

TINY = 1e-3


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> list[Any]:
    """The answer as SymPy reads it, if it can, and as a string."""
    # The box as a whole or nothing: math-verify would else search it for some part that it can read.
    return parse(
        f"\\boxed{{{text}}}",
        [LatexExtractionConfig()],
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]  (None is documented)
        raise_on_error=True,
    )


def agree_in_scale(gold: Any, answer: Any) -> bool:
    """False for tiny numbers that differ: math-verify compares to an absolute 1e-6, by which 1e-9 would equal 1e-30."""
    sides = [side.rhs if isinstance(side, Eq) else side for side in (gold, answer)]
    if not all(isinstance(side, Expr) and side.is_number for side in sides):
        return True
    gold, answer = (side.doit() for side in sides)
    size = abs(gold.evalf())
    return bool(size == 0 or size > TINY or abs((gold - answer).evalf()) <= 1e-3 * size)


def equal(gold: Any, answer: Any) -> bool:
    """Whether two readings agree; False where they cannot be compared, for which SymPy raises all sorts."""
    try:
        same = verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        return same and agree_in_scale(gold, answer)
    except MemoryError:
        raise
    except Exception:
        return False


def grade(gold: str, answer: str, cpu_seconds: float) -> str:
    """Right if any reading of the answer agrees with any of the gold."""
    # CPU time, which other processes cannot use up. Again and again, as SymPy catches all exceptions at places.
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds, 0.5)
    try:
        pairs = itertools.product(parsed(gold), parsed(answer))
        return "right" if any(equal(*pair) for pair in pairs) else "wrong"
    except TimeoutException:
        return "timed out"
    except MemoryError:
        raise
    except Exception:  # as above
        return "wrong"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def time_out(*_: object) -> None:
    raise TimeoutException


def main() -> None:
    memory_bytes, cpu_seconds = int(sys.argv[1]), float(sys.argv[2])
    if sys.platform == "linux":  # elsewhere it cannot be lowered
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGVTALRM, time_out)
    # What libraries print must not pass for a reply, and their complaints about odd answers are of no use.
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    grade("1", "1", cpu_seconds=60.0)
    os.write(replies, b'"ready"\n')
    os.dup2(nowhere, 2)
    for line in sys.stdin:
        # Some computations let no Python code run, and the parent that would end them may be gone: this signal kills.
        signal.setitimer(signal.ITIMER_PROF, 2 * cpu_seconds)
        gold, answer = json.loads(line)
        outcome = grade(gold, answer, cpu_seconds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, f"{json.dumps(outcome)}\n".encode())


if __name__ == "__main__":
    main()
