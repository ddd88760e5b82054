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

optional TORCH bash launch/torch.sh
optional JETSTREAM bash third_party/jetstream/setup.sh
ruff check .
ruff format --check .
optional SGLANG bash third_party/sglang/setup.sh cpu
optional LIBTPU bash launch/compiler_env.sh tpu
# Types take a minute on one core, so they are checked beside the tests, and told after them.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
pyright >"$types" 2>&1 &
# Three at a time keep two cores busy, as many tests wait for servers; the tests of one file share what they start.
passed=0
pytest --numprocesses=3 --dist=loadfile "$@" || passed=$?
wait $! || passed=$?
cat "$types"
exit "$passed"
