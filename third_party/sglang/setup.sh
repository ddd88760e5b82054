#!/usr/bin/env bash
# Creates or reuses a separate environment for SGLang in this folder: env-gpu for NVIDIA GPUs, env-cpu for the tests.
#
#   bash third_party/sglang/setup.sh gpu|cpu        (SGLANG_PYTHON=... selects another interpreter)
#
# SGLang and the trainer require different versions of torch and transformers. The CPU requirements omit packages that
# only CUDA needs, which `pip install sglang` would install. cpu_shim/ replaces sgl_kernel, which is not available as a
# CPU wheel, and two operators of torchvision.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../../launch/environments.sh"
case ${1:-} in
  cpu) version=3.11 ;;
  gpu) version=3.12 ;;
  *) echo "Usage: bash third_party/sglang/setup.sh gpu|cpu" >&2; exit 2 ;;
esac
env=$here/env-$1 pins=$here/requirements-$1.txt python=${SGLANG_PYTHON:-python$version}
stamp=$env/installed-$(cksum <"$pins" | tr -d ' ')
[ ! -e "$stamp" ] || exit 0
found=$("$python" --version 2>/dev/null) || found=missing
[[ $found == "Python $version."* ]] ||
  fail "SGLang for $1 requires Python $version, but $python is $found; install it, or select one with SGLANG_PYTHON=..."
echo "Installing SGLang for $1 into $env (a few minutes) ..."
make_env "$env" "$python"
# torch on PyPI requires CUDA libraries. The CPU build is in a separate index.
if [ "$1" = cpu ]; then
  install "$env" --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$(grep ^torch== "$pins")"
fi
install "$env" --no-deps --requirement "$pins"
touch "$stamp"
