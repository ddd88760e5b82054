#!/usr/bin/env bash
# Checks everything: style, types, and every test, including the slow ones and those against real SGLang servers.
# Arguments go to pytest; `-m "not slow"` leaves out tests that take more than about two seconds.
#
# If torch for CPUs or JetStream cannot be installed, or the environments of SGLang or of the TPU compiler cannot be
# made, their tests are skipped and say so; with POLY_EPO_REQUIRE_TORCH=1, POLY_EPO_REQUIRE_JETSTREAM=1,
# POLY_EPO_REQUIRE_SGLANG=1 and POLY_EPO_REQUIRE_LIBTPU=1 this script fails instead.
#
#   LOCK=newest bash launch/test.sh     with the newest versions that setup.py allows: has the ecosystem moved?
source "$(dirname "$0")/setup_env.sh" "[test]"

optional() { # NAME COMMAND...
  local name=$1 required=POLY_EPO_REQUIRE_$1
  shift
  "$@" && return
  [ -z "${!required:-}" ] || exit 1
  echo "Warning: without $name, its tests are skipped." >&2
}

# Kept apart from the packages of .venv: transformers imports torch if it finds it, and none of our runs needs it.
install_torch() {
  [ -d .venv/torch/torch ] || (install .venv --no-deps --target .venv/torch --requirement tests/requirements-torch.txt)
}

optional TORCH install_torch
optional JETSTREAM bash third_party/jetstream/setup.sh
ruff check .
ruff format --check .
pyright &
types=$!
optional SGLANG bash third_party/sglang/setup.sh cpu
optional LIBTPU bash launch/compiler_env.sh tpu
wait "$types"
# Three at a time keep two cores busy, as many tests wait for servers; the tests of one file share what they start.
pytest --numprocesses=3 --dist=loadfile "$@"
