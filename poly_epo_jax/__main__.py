"""The command `poly-epo` as a module: python -m poly_epo_jax COMMAND"""

import sys

from poly_epo_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
