r"""One worker of the verifier: reads lines of JSON [gold, answer], writes "right", "wrong" or "timed out" for each.

It is a program of its own, so that it imports neither this package nor JAX: `python -P verify_worker.py BYTES SECONDS`,
with its memory and the CPU time of one comparison. It grades in its main thread, as no other can be interrupted.
"""

import functools
import itertools
import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from sympy import And, Eq, Expr, FiniteSet, Interval, MatrixBase, Rational, Tuple

PERCENT = re.compile(r"\\text\s*\{\s*(?:percent|pct)\s*\}|(?<![a-zA-Z])(?:percent|pct)(?![a-zA-Z])|\\?%")
DECIMAL = re.compile(r"(?<![\d.])(\d{1,3}(?:,\d{3})+|\d*)\.(\d+)(?!\d|\.\.|\\l?dots)", re.ASCII)
BASE = re.compile(r"(?<=\d)\s*_\s*(\w|\{[^{}]*(?:\{[^{}]*\}[^{}]*)?\})", re.ASCII)
SPACE = r"(?:\s|\\[ ,;:!>]|\\q?quad)"
# SymPy reads two numbers side by side as a mixed number: 2(3) as 5.
FACTORS = re.compile(r"((?<![\w^_.\\}])\d+|\))\s*(?=\(|\\left\s*\()|\)\s*(?=\d)", re.ASCII)
NUMBER_AS_TEXT = re.compile(r"\\(?:text|mbox)\s*\{\s*(-?\d[\d.,]*)\s*\}", re.ASCII)
UNCLEAR = re.compile(
    rf"(?<![\w\\^_.}}])\d+(?:\.\d+)?{SPACE}+[\d.]"  # two numbers
    r"|(?<![\w^_}])\d+\s*\{|(?:^|[^}\]\w\s^_])\s*\{\d+\}\s*[\d{]|\\phantom"  # in braces, or next to something invisible
    r"|\\(?:text|mbox)\s*\{(?:[^{}]*[^{}\w^/])?\d|\u2030",  # a text with a number, which is not a unit; per mille
    re.ASCII,
)


def readings(text: str) -> list[Any]:
    """What an answer may mean. A decimal is the fraction that it spells, and a percentage is divided by 100."""
    text = NUMBER_AS_TEXT.sub(r"\1", text)
    if UNCLEAR.search(text):
        return [text]
    text = PERCENT.sub(r" \\cdot \\frac{1}{100}", BASE.sub("", text))
    return parsed(FACTORS.sub(r"\g<0> \\cdot ", DECIMAL.sub(_fraction, text)))


def _fraction(match: re.Match[str]) -> str:
    whole, digits = match.groups()
    fraction = rf"\frac{{{whole.replace(',', '')}{digits}}}{{1{'0' * len(digits)}}}"
    return f"{{{fraction}}}" if match.string[: match.start()].endswith(("^", "_")) else fraction


def bases(text: str) -> list[str]:
    """The number bases that an answer names, except for ten, which goes without saying."""
    named = (re.sub(r"[^\w]", "", match[1].replace(r"\text", "")) for match in BASE.finditer(text))
    return [base for base in named if base != "10"]


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> list[Any]:
    """The answer as SymPy reads it, if it can, and as a string."""
    # The whole box or nothing: otherwise math-verify would search it for some part that it can read.
    return parse(
        f"\\boxed{{{text}}}",
        [LatexExtractionConfig()],
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]  (None is documented)
        raise_on_error=True,
    )


def agree_exactly(gold: Any, answer: Any) -> bool:
    """False for numbers that differ: math-verify's tolerance is an absolute 1e-15, so 1e-19 would equal 1e-30."""
    gold, answer = (side.rhs if isinstance(side, Eq) else side for side in (gold, answer))
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return all(map(agree_exactly, gold.flat(), answer.flat()))
    if isinstance(gold, Tuple | FiniteSet | Interval) and type(gold) is type(answer):
        return all(map(agree_exactly, gold.args, answer.args))
    if not all(isinstance(side, Expr) and side.is_number for side in (gold, answer)):
        return True
    gold, answer = gold.doit(), answer.doit()
    if isinstance(gold, Rational) and isinstance(answer, Rational):
        return gold == answer
    return bool(abs((gold - answer).evalf()) <= 1e-10 * abs(gold.evalf()))


def sides(reading: Any) -> Iterator[Any]:
    """The expressions that a chain of equations says are equal."""
    if isinstance(reading, And):
        for link in reading.args:
            yield from sides(link)
    elif isinstance(reading, Eq):
        yield from reading.args


def is_contradiction(reading: Any) -> bool:
    """Whether a reading says that different numbers are equal, as 26 = 27: an answer that names both is neither."""
    numbers = [side for side in sides(reading) if isinstance(side, Expr) and not side.free_symbols]
    return any(not equal(numbers[0], other) for other in numbers[1:])


def unwrapped(reading: Any) -> Any:
    """The element of a set that has only one; any other reading as it is."""
    return reading.args[0] if isinstance(reading, FiniteSet) and len(reading.args) == 1 else reading


def equal(gold: Any, answer: Any) -> bool:
    """Whether two readings agree; False if they cannot be compared, for which SymPy raises all sorts of exceptions."""
    gold, answer = unwrapped(gold), unwrapped(answer)
    try:
        same = verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        return same and agree_exactly(gold, answer) and not is_contradiction(answer)
    except MemoryError:
        raise
    except Exception:
        return False


def same(gold: str, answer: str) -> bool:
    """Whether any reading of the answer agrees with any reading of the gold answer.

    An answer may leave out the base and the percent sign of the gold answer, but may not add its own.
    """
    if bases(answer) not in ([], bases(gold)):
        return False
    meant = readings(gold)
    if PERCENT.search(gold) and not PERCENT.search(answer):
        meant = meant + readings(PERCENT.sub("", gold))
    return any(equal(*pair) for pair in itertools.product(meant, readings(answer)))


def grade(gold: str, answer: str, cpu_seconds: float) -> str:
    """ "right", "wrong" or "timed out"."""
    # CPU time, which other processes cannot use up. The timer repeats, as SymPy catches all exceptions in some places.
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds, 0.5)
    try:
        return "right" if same(gold, answer) else "wrong"
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
    # What libraries print must not be taken for a reply, and their complaints about odd answers are of no use.
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
