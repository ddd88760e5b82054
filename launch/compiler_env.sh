#!/usr/bin/env bash
# Creates or reuses an environment that compiles for accelerators that are not available locally: .venv-tpu contains
# libtpu, and .venv-gpu the CUDA plugin (5 GB). They are not installed into the .venv of the trainer, where they would
# search for a device.
#
#   bash launch/compiler_env.sh tpu|gpu        (PYTHON=... selects another interpreter)
#   .venv-tpu/bin/python -m poly_epo_jax.bench --config=configs/polaris.py:v5p-8 --compile_for=v5p-8
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environments.sh
case ${1:-} in
  tpu | gpu) env=.venv-$1 ;;
  *) echo "Usage: bash launch/compiler_env.sh tpu|gpu" >&2; exit 2 ;;
esac
stamp=$env/installed-$(cat pyproject.toml setup.py launch/lock.txt | cksum | tr -d ' ')
[ ! -e "$stamp" ] || exit 0
find_python
echo "Installing into $env (a few minutes) ..."
make_env "$env" "$python"
install "$env" --constraint launch/lock.txt --editable ".[$1]"
rm "$env/unfinished"
touch "$stamp"
