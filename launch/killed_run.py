"""Trains like `poly_epo_jax.main`, but kills its own process while the checkpoint of step 12 is committed.

At this point, the files of the checkpoint are written, but their folder has not been renamed. A resume therefore starts
from the checkpoint before it.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from poly_epo_jax.main import main

STEP = "12"


def kill_at_commit(event: str, arguments: tuple[Any, ...]) -> None:
    """Ends the process like `kill -9` when the checkpoint is renamed. Audit hook of the interpreter."""
    if event == "os.rename" and Path(os.fsdecode(arguments[1])).parts[-2:] == ("checkpoints", STEP):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.addaudithook(kill_at_commit)
    sys.exit(main())
