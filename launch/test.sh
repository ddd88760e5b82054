#!/usr/bin/env bash
# Everything that must hold: style, types, and every test, the slow ones too.
source "$(dirname "$0")/setup_env.sh" "[test]"

ruff check .
ruff format --check .
pyright
pytest "$@"
