#!/usr/bin/env bash
# Installs torch for CPUs, the reference implementation of some tests, and TRL, in which one test trains with set_rl, into
# .venv/torch. It is separate from the packages of .venv, because transformers imports torch if it is available, and
# training does not need it.
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" "[test]"
[ -d .venv/torch/torch ] || install .venv --no-deps --target .venv/torch --requirement launch/requirements-torch.txt
[ -d .venv/torch/trl ] || install .venv --no-deps --target .venv/torch trl==1.16.0 accelerate==1.15.0
