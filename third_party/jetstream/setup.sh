#!/usr/bin/env bash
# Installs google-jetstream into the trainer's .venv, as JetStream decodes inside the trainer's process.
#
#   bash third_party/jetstream/setup.sh
#
# It is installed without its own dependencies, of which seqio would bring in TensorFlow for a tokenizer that is not
# used here; what it does need is in the extra `jetstream` of setup.py. rollouts/jetstream/mended.py fixes the rest.
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/setup_env.sh" "[jetstream]"
version=0.2.2
[ "$(python -c 'import importlib.metadata as m; print(m.version("google-jetstream"))' 2>/dev/null)" = "$version" ] ||
  install .venv --no-deps "google-jetstream==$version"
