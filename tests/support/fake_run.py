"""A run that takes a tenth of a second, as a program: python -m fake_run FOLDER HOW.

HOW is `well`, `badly` (fails with a sentence), or `slowly` (runs until a signal ends it, and says that it is saved).
"""

import json
import os
import signal
import sys
from pathlib import Path


def main(folder: Path, how: str) -> None:
    (folder / "seen.json").write_text(json.dumps({"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "how": how}))
    if how == "badly":
        sys.exit("Error: no room: make some.")
    if how == "slowly":

        def save(number: int, _: object) -> None:
            (folder / "saved").touch()
            print("SIGTERM: Saved after step 3. Rerun the command to resume.", file=sys.stderr)
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, save)
        (folder / "under_way").touch()
        signal.pause()
    (folder / "done").touch()


main(Path(sys.argv[1]), sys.argv[2])
