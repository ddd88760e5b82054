#!/usr/bin/env bash
# Installs torch for CPUs, the reference of some tests, into .venv/torch: kept apart from the packages of .venv, as
# transformers imports torch if it finds it, and none of our runs needs it.
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" "[test]"
[ -d .venv/torch/torch ] || install .venv --no-deps --target .venv/torch --requirement launch/requirements-torch.txt
