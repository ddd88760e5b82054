r"""Worker process of the verifier: `python -P worker.py BYTES SECONDS SCRIPT ARGUMENT ...`.

Calls `open_grader(ARGUMENT, ...)` of the script, and writes the JSON line "ready". Then reads one JSON list per
answer, calls the grader with its items, and writes the returned value, or "wrong" if the grader raised an exception, or
"timed out", as a JSON line. BYTES and SECONDS are the memory limit of the process and the CPU time limit of one answer.
The worker and its script import neither this package nor JAX. The worker grades in the main thread, because signals
interrupt only that thread.
"""

import json
import logging
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any


class TimedOut(BaseException):
    """Raised when an answer has exceeded its time limit. Graders that catch all kinds of Exception do not catch it."""


def grade(grader: Callable[..., Any], request: list[str], cpu_seconds: float) -> Any:
    """Grades an answer.

    Args:
      grader: Function that receives the items of the request.
      request: Items of the request.
      cpu_seconds: CPU time limit in seconds.

    Returns:
      The value that the grader returned, "wrong" if it raised an exception, or "timed out".
    """
    # CPU time does not depend on other processes. The timer repeats because SymPy catches all exceptions in some
    # places.
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds, 0.5)
    try:
        return grader(*request)
    except TimedOut:
        return "timed out"
    except MemoryError:
        raise
    except Exception:  # Libraries raise many kinds of exceptions for answers that they cannot read.
        return "wrong"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def time_out(*_: object) -> None:
    """Signal handler that cancels the current answer."""
    raise TimedOut


def main() -> None:
    """Sets the limits of the process, and grades the lines of stdin until it is closed."""
    memory_bytes, cpu_seconds, script, *arguments = int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]
    if sys.platform == "linux":  # Other platforms do not support lowering this limit.
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGVTALRM, time_out)
    # Output of libraries must not be mistaken for a reply. Their warnings about unusual answers are discarded.
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    grader = runpy.run_path(script)["open_grader"](*arguments)
    os.write(replies, b'"ready"\n')
    os.dup2(nowhere, 2)
    for line in sys.stdin:
        # Some computations block Python signal handlers, and the parent may have terminated. SIGPROF is not handled, so
        # it kills the process.
        signal.setitimer(signal.ITIMER_PROF, 2 * cpu_seconds)
        reply = grade(grader, json.loads(line), cpu_seconds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, f"{json.dumps(reply)}\n".encode())


if __name__ == "__main__":
    main()
