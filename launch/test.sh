#!/usr/bin/env bash
# Everything that must hold: style, types, and every test, the slow ones and those against real SGLang servers too.
# Where SGLang's environment cannot be made, or JetStream cannot be installed, their tests are skipped and say so;
# POLY_EPO_REQUIRE_SGLANG=1 and POLY_EPO_REQUIRE_JETSTREAM=1 fail instead.
source "$(dirname "$0")/setup_env.sh" "[test]"

bash third_party/jetstream/setup.sh || {
  [ -z "${POLY_EPO_REQUIRE_JETSTREAM:-}" ] || exit 1
  echo "Warning: without google-jetstream, its tests are skipped." >&2
}
ruff check .
ruff format --check .
pyright
bash third_party/sglang/setup.sh cpu || {
  [ -z "${POLY_EPO_REQUIRE_SGLANG:-}" ] || exit 1
  echo "Warning: without SGLang's environment, the tests against real servers are skipped." >&2
}
pytest "$@"
