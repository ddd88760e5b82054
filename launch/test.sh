#!/usr/bin/env bash
# Runs all checks: style, types, and all tests, including slow tests and tests with real SGLang and vLLM servers. Arguments
# are passed to pytest, e.g. `-m "not slow"` to skip tests that take more than about two seconds.
#
# If torch for CPUs, JetStream, reasoning-gym, TextArena, or the environment of SGLang, vLLM or the TPU compiler cannot be
# installed, their tests are skipped with a warning. With POLY_EPO_REQUIRE_TORCH=1, POLY_EPO_REQUIRE_JETSTREAM=1,
# POLY_EPO_REQUIRE_REASONING_GYM=1, POLY_EPO_REQUIRE_TEXTARENA=1, POLY_EPO_REQUIRE_SGLANG=1, POLY_EPO_REQUIRE_VLLM=1 or
# POLY_EPO_REQUIRE_LIBTPU=1, this script fails instead.
#
#   LOCK=newest bash launch/test.sh     tests with the newest versions that pyproject.toml allows
source "$(dirname "$0")/help.sh"
source "$(dirname "$0")/setup_env.sh" "[test]"

optional() { # NAME COMMAND...
  local name=$1 required=POLY_EPO_REQUIRE_$1
  shift
  "$@" && return
  [ -z "${!required:-}" ] || exit 1
  echo "Warning: $name is not available; its tests are skipped." >&2
}

optional REASONING_GYM bash launch/reasoning_gym.sh
optional TEXTARENA bash launch/textarena.sh
optional TORCH bash launch/torch.sh
optional JETSTREAM bash third_party/jetstream/setup.sh
ruff check .
ruff format --check .
optional SGLANG bash third_party/sglang/setup.sh cpu
optional VLLM bash third_party/vllm/setup.sh cpu
optional LIBTPU bash launch/compiler_env.sh tpu
# Checking types takes a minute on one core, so pyright runs in parallel with the tests. Its output is printed last.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
pyright >"$types" 2>&1 &
# Three processes keep two cores busy, because many tests wait for servers. The tests of a file share their fixtures.
passed=0
pytest --numprocesses=3 --dist=loadfile "$@" || passed=$?
wait $! || passed=$?
cat "$types"
exit "$passed"
