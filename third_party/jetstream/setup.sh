#!/usr/bin/env bash
# Installs google-jetstream into the trainer's .venv, because JetStream decodes in the trainer's process.
#
#   bash third_party/jetstream/setup.sh
#
# It is installed without its declared dependencies, because seqio would install TensorFlow for a tokenizer that is not
# used. The extra `jetstream` of pyproject.toml contains the required dependencies. rollouts/jetstream/patched.py applies
# patches at import time.
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/setup_env.sh" "[jetstream]"
version=0.2.2
[ "$(python -c 'import importlib.metadata as m; print(m.version("google-jetstream"))' 2>/dev/null)" = "$version" ] ||
  install .venv --no-deps "google-jetstream==$version"
