#!/usr/bin/env bash
# Makes or reuses SGLang's own environment next to this file: env-gpu to serve on NVIDIA GPUs, env-cpu to run the tests.
#
#   bash third_party/sglang/setup.sh gpu|cpu        (SGLANG_PYTHON=... names another interpreter)
#
# It is kept apart from the trainer's, as the two pin different versions of torch and transformers. The CPU pins leave
# out packages that only CUDA needs, which `pip install sglang` would bring in. cpu_shim/ stands in for sgl_kernel, of
# which there is no CPU wheel, and for two operators of torchvision.
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
  fail "SGLang's $1 pins need Python $version, and $python is $found; install it, or name one with SGLANG_PYTHON=..."
echo "Installing SGLang for $1 into $env (a few minutes) ..."
make_env "$env" "$python"
# PyPI's torch needs CUDA's libraries; the build for CPUs has an index of its own.
if [ "$1" = cpu ]; then
  install "$env" --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$(grep ^torch== "$pins")"
fi
install "$env" --no-deps --requirement "$pins"
touch "$stamp"
