"""A fake training run that takes 0.1 seconds: python -m fake_run FOLDER HOW.

HOW is `well` (succeeds), `badly` (fails with an error message), or `slowly` (runs until SIGTERM, then saves and exits).
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
        (folder / "started").touch()
        signal.pause()
    (folder / "done").touch()


main(Path(sys.argv[1]), sys.argv[2])
