#!/usr/bin/env bash
# Checks and measures an accelerator in nine minutes: correctness, learning, speed of update and decoding, whole steps,
# tests. It does not require a network or a model. docs/how_to/check_a_machine.md describes the stages and the output.
#
#   bash launch/accelerator.sh                            writes runs/accelerator/summary.json, and prints it as a table
#   bash launch/accelerator.sh --stages doctor update     selects stages; --minutes=5 and --output=DIR are other options
#   bash launch/accelerator.sh --stages compare           GRPO against Poly-EPO with a policy of 90 million weights
#   bash launch/accelerator.sh --collect-wheels FOLDER    downloads packages that images with JAX usually lack
#   bash launch/accelerator.sh --wheels FOLDER            installs those of them that are missing, without an index
#   SMALL=1 bash launch/accelerator.sh                    rehearses the command with tiny sizes, on any machine
#
# The command uses .venv if it exists, and otherwise the first Python with JAX. PYTHON=... selects another interpreter.
# Wheels are installed into FOLDER/packages. The environment of the interpreter is not changed.
source "$(dirname "$0")/help.sh"
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environments.sh

# Packages of the extras train and test that images with JAX, its libraries, transformers and pytest usually lack. The
# wheels are for Linux on the architecture of this machine.
packages=(antlr4-python3-runtime array-record beartype cloudpickle grain latex2sympy2-extended math-verify
  ml-collections portpicker tensorboardX)
target=(--python-version=3.12 --platform="manylinux_2_28_$(uname -m)" --platform="manylinux2014_$(uname -m)")

collect() { # FOLDER
  find_python
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: "${target[@]}" \
    --constraint=launch/lock.txt --dest="$1" "${packages[@]}" || fail "downloading failed; see the output of pip above."
  echo "wheels: $1"
}

add_missing() { # WHEELS FOLDER: installs wheels of packages that the interpreter does not have
  local wheel name missing=() is_installed='import importlib.metadata as m, sys; m.version(sys.argv[1])'
  for wheel in "$1"/*.whl; do
    name=$(basename "$wheel")
    PYTHONPATH=$2 "$python" -c "$is_installed" "${name%%-*}" 2>/dev/null || missing+=("$wheel")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade --target="$2" \
    "${missing[@]}" || fail "installing the wheels in $1 failed; see the output of pip above."
}

output=runs/accelerator wheels='' flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels=* | --collect-wheels=* | --output=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --wheels) wheels=${2:?is missing; append the folder}; shift 2 ;;
    --output) output=${2:?is missing; append the folder}; shift 2 ;;
    --collect-wheels) collect "${2:?is missing; append the folder}"; exit ;;
    *) flags+=("$1"); shift ;;
  esac
done

python=
for candidate in ${PYTHON:-.venv/bin/python python3 python python3.13 python3.12 python3.11}; do
  ! "$candidate" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("jax") is None)' 2>/dev/null ||
    { python=$candidate && break; }
done
[ -n "$python" ] || fail "no Python with JAX was found; install the package (docs/how_to/install.md), or set PYTHON=..."
mkdir -p "$output" 2>/dev/null || fail "$output cannot be created; choose another folder."
output=$(cd "$output" && pwd)
[ -z "$wheels" ] || wheels=$(cd "$wheels" && pwd) || exit
[ -z "$wheels" ] || add_missing "$wheels" "$wheels/packages"

# All processes share compiled programs. Their working folder is the output folder.
export PYTHONPATH=$PWD${wheels:+:$wheels/packages}${PYTHONPATH:+:$PYTHONPATH} JAX_COMPILATION_CACHE_DIR=$output/runs/compiled
CARD=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null) || CARD=''
export CARD HF_HUB_OFFLINE=1 JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
if [ -z "${SMALL:-}" ]; then
  export POLY_EPO_TEST_PLATFORM=gpu
else # compiling takes most of the time
  export XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true ${XLA_FLAGS:-}"
fi
exec "$python" -m poly_epo_jax.accelerator --output="$output" "${flags[@]}"
