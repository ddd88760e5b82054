#!/usr/bin/env bash
# Builds the source distribution and, from it, the wheel in dist/, checks their metadata and CITATION.cff, and tests the
# wheel in a new environment with the packages of an installation without extras. It takes about a minute, mostly for
# downloads, and 0.7 GB of temporary disk space.
#
#   bash launch/package.sh        (PYTHON=... selects another interpreter)
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environments.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
find_python
make_env "$folder/tools" "$python"
install "$folder/tools" "build>=1,<2" "twine>=6.1,<8" "cffconvert>=2,<3"
"$folder/tools/bin/cffconvert" --validate
rm -rf dist
"$folder/tools/bin/python" -m build --outdir dist >"$folder/log" 2>&1 || { cat "$folder/log" >&2 && exit 1; }
"$folder/tools/bin/twine" check --strict dist/*

make_env "$folder/base" "$python"
install "$folder/base" --constraint launch/lock.txt dist/*.whl
cd "$folder"
export PATH=$folder/base/bin:$PATH
poly-epo explain --rewards 1,1,1,1,1,1,0,0 --strategies A,A,A,A,A,B,A,C
if output=$(poly-epo train --config=polynomial 2>&1); then fail "training succeeded without the extra train."; fi
[[ $output == "Error: "*"pip install 'poly-epo-jax[train] @ file://"*".whl'"* ]] || fail "training failed with another error: $output"
