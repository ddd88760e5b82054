#!/usr/bin/env bash
# Installs TextArena, whose games some tests play, into .venv.
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" "[test]"
python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("textarena") is None)' ||
  install .venv --constraint launch/lock.txt textarena
