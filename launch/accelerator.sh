#!/usr/bin/env bash
# Checks and measures an accelerator in nine minutes: correctness, learning, speed of update and decoding, whole steps,
# tests. It does not require a network or a model. docs/how_to/check_a_machine.md describes the stages and the output.
#
#   bash launch/accelerator.sh [--minutes=9] [--output=runs/accelerator] [--stages=doctor,learning,update,decode,step,tests]
#   bash launch/accelerator.sh --stages=compare           GRPO against Poly-EPO with a policy of 90 million weights
#   bash launch/accelerator.sh --collect-wheels FOLDER    downloads packages that images with JAX usually lack
#   bash launch/accelerator.sh --wheels FOLDER            installs those of them that are missing, without an index
#   SMALL=1 bash launch/accelerator.sh                    rehearses the command with tiny sizes, on any machine
#
# The command uses .venv if it exists, and otherwise the first Python with JAX (PYTHON=... selects another interpreter).
# Packages are installed into a folder beside the results, and the environment of the interpreter is not changed.
source "$(dirname "$0")/help.sh"
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environments.sh

# Pure Python packages, which run on Linux with any interpreter of the version below.
packages=(absl-py antlr4-python3-runtime beartype latex2sympy2-extended math-verify ml-collections tensorboardX)
python_version=3.12

output=runs/accelerator wheels='' flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels=* | --collect-wheels=* | --output=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --wheels) wheels=${2:?is missing; append the folder}; shift 2 ;;
    --output) output=${2:?is missing; append the folder}; shift 2 ;;
    --collect-wheels)
      find_python
      "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version="$python_version" --constraint=launch/lock.txt --dest="${2:?is missing; append the folder}" \
        "${packages[@]}" || fail "downloading failed; see the output of pip above."
      echo "wheels: $2"
      exit
      ;;
    *) flags+=("$1"); shift ;;
  esac
done

has_jax() { "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("jax") is None)' 2>/dev/null; }
python=
for candidate in ${PYTHON:-.venv/bin/python python3 python python3.13 python3.12 python3.11}; do
  if has_jax "$candidate"; then python=$candidate && break; fi
done
[ -n "$python" ] || fail "no Python with JAX was found; install the package (pip install '.[gpu]'), or set PYTHON=..."

mkdir -p "$output" && output=$(cd "$output" && pwd) || fail "$output cannot be created; choose another folder."
if [ -n "$wheels" ]; then
  mapfile -t missing < <(
    for wheel in "$wheels"/*.whl; do
      name=$(basename "$wheel")
      "$python" -c 'import importlib.metadata as m, sys; m.version(sys.argv[1])' "${name%%-*}" 2>/dev/null || echo "$wheel"
    done
  )
  [ ${#missing[@]} -eq 0 ] ||
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade \
      --target="$output/packages" "${missing[@]}" || fail "installing from $wheels failed; see the output of pip above."
fi
# All processes share compiled programs. Their working folder is the output folder.
export PYTHONPATH=$PWD:$output/packages${PYTHONPATH:+:$PYTHONPATH} JAX_COMPILATION_CACHE_DIR=$output/runs/compiled
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
exec "$python" -m poly_epo_jax.accelerator --output="$output" "${flags[@]}"
