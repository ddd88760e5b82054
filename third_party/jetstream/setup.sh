#!/usr/bin/env bash
# Installs google-jetstream into the trainer's .venv: JetStream decodes inside of the trainer's process.
#
#   bash third_party/jetstream/setup.sh
#
# Without its own list of dependencies, whose seqio would bring TensorFlow for a tokenizer that is not used here; what it
# does need is the extra `jetstream` of setup.py. rollouts/jetstream/mended.py mends the rest.
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/setup_env.sh" "[jetstream]"
version=0.2.2
[ "$(python -c 'import importlib.metadata as m; print(m.version("google-jetstream"))' 2>/dev/null)" = "$version" ] ||
  install .venv --no-deps "google-jetstream==$version"
