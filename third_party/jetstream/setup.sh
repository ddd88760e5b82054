#!/usr/bin/env bash
# Installs JetStream and the add-on poly_epo_jetstream, which registers rollouts.name=jetstream, into the trainer's .venv,
# because JetStream decodes in the trainer's process.
#
#   bash third_party/jetstream/setup.sh
#
# google-jetstream is installed without its declared dependencies, because seqio would install TensorFlow for a tokenizer
# that is not used. pyproject.toml of this folder lists the required ones. poly_epo_jetstream/patched.py applies patches at
# import time.
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/setup_env.sh" "[train]"
version=0.2.2
installed='import importlib.metadata as m; print(m.version("google-jetstream"), m.version("poly-epo-jetstream"))'
if [ "$(python -c "$installed" 2>/dev/null)" != "$version 0.1.0" ]; then
  install .venv --constraint launch/lock.txt --editable third_party/jetstream
  install .venv --no-deps "google-jetstream==$version"
fi
