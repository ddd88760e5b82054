#!/usr/bin/env bash
# Runs style checks, type checks and tests. The default tests take 7 to 20 minutes on two CPU cores and only use the
# packages of the extra `test`. `all` adds tests that require torch, a server or another environment, or many CPU seconds.
#
#   bash launch/test.sh                 default tests
#   bash launch/test.sh all             all tests, including tests with real SGLang and vLLM servers: about 40 minutes
#   bash launch/test.sh all --lf        only the tests that failed; other arguments are passed to pytest, too
#   LOCK=newest bash launch/test.sh     tests with the newest versions that pyproject.toml allows
#
# If torch for CPUs, JetStream, reasoning-gym, TextArena, or the environment of SGLang, vLLM or the TPU compiler cannot be
# installed, `all` skips their tests with a warning. With POLY_EPO_REQUIRE_TORCH=1, POLY_EPO_REQUIRE_JETSTREAM=1,
# POLY_EPO_REQUIRE_REASONING_GYM=1, POLY_EPO_REQUIRE_TEXTARENA=1, POLY_EPO_REQUIRE_SGLANG=1, POLY_EPO_REQUIRE_VLLM=1 or
# POLY_EPO_REQUIRE_LIBTPU=1, it fails instead.
source "$(dirname "$0")/help.sh"
source "$(dirname "$0")/setup_env.sh" "[test]"

optional() { # NAME COMMAND...
  local name=$1 required=POLY_EPO_REQUIRE_$1
  shift
  "$@" && return
  [ -z "${!required:-}" ] || exit 1
  echo "Warning: $name is not available; its tests are skipped." >&2
}

# The tests of a file share their fixtures, so one process runs them.
tests=(--numprocesses=2 --dist=loadfile)
if [ "${1:-}" = all ]; then
  shift
  # Three processes keep two cores busy, because many of these tests wait for servers.
  tests=(--numprocesses=3 --dist=loadfile -m "")
  optional REASONING_GYM bash launch/reasoning_gym.sh
  optional TEXTARENA bash launch/textarena.sh
  optional TORCH bash launch/torch.sh
  optional JETSTREAM bash third_party/jetstream/setup.sh
  optional SGLANG bash third_party/sglang/setup.sh cpu
  optional VLLM bash third_party/vllm/setup.sh cpu
  optional LIBTPU bash launch/compiler_env.sh tpu
fi
ruff check .
ruff format --check .
# Checking types takes a minute on one core, so pyright runs in parallel with the tests. Its output is printed last.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
pyright >"$types" 2>&1 &
passed=0
pytest "${tests[@]}" "$@" || passed=$?
wait $! || passed=$?
cat "$types"
exit "$passed"
