#!/usr/bin/env bash
# Makes SGLang's own environment beside this file, or reuses it: env-gpu to serve on NVIDIA, env-cpu to run the tests.
#
#   bash third_party/sglang/setup.sh gpu|cpu        (SGLANG_PYTHON=... names another interpreter)
#
# It is kept apart from the trainer's: the two pin different versions of torch and transformers. The CPU pins leave out
# what only CUDA needs, which `pip install sglang` would bring; sgl_kernel, of which there is no CPU wheel, and two
# operators of torchvision are stood in for by cpu_shim/.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case ${1:-} in
  cpu) python=${SGLANG_PYTHON:-python3.11} versions='(3, 11)' ;;
  gpu) python=${SGLANG_PYTHON:-python3.12} versions='(3, 12)' ;;
  *) echo "Usage: bash third_party/sglang/setup.sh gpu|cpu" >&2; exit 2 ;;
esac
env=$here/env-$1 pins=$here/requirements-$1.txt
"$python" -c "import sys; sys.exit(sys.version_info[:2] != $versions)" || {
  echo "Error: SGLang's $1 pins need Python $versions, and $python is not that; name one with SGLANG_PYTHON=..." >&2
  exit 1
}
stamp=$env/installed-$(cksum <"$pins" | tr -d ' ')
[ ! -e "$stamp" ] || exit 0
echo "Installing SGLang for $1 into $env (a few minutes) ..."
rm -rf "$env"
"$python" -m venv "$env"
install() { "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }
# PyPI's torch needs CUDA's libraries; the one built for CPUs has an index of its own.
if [ "$1" = cpu ]; then install --extra-index-url https://download.pytorch.org/whl/cpu "$(grep ^torch== "$pins")"; fi
install --requirement "$pins"
touch "$stamp"
