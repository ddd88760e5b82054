#!/usr/bin/env bash
# Installs reasoning-gym, whose tasks some tests use, into .venv. A machine without a C compiler cannot install it.
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" "[test]"
python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("reasoning_gym") is None)' ||
  install .venv --constraint launch/lock.txt reasoning-gym
