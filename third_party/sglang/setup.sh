#!/usr/bin/env bash
# Creates or reuses a separate environment for SGLang in this folder: env-gpu for NVIDIA GPUs, env-cpu for the tests.
#
#   bash third_party/sglang/setup.sh gpu|cpu        (SGLANG_PYTHON=... selects another interpreter)
#
# The CPU requirements omit packages that only CUDA needs, which `pip install sglang` would install. cpu_shim/ replaces
# sgl_kernel, which is not available as a CPU wheel, and two operators of torchvision.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../../launch/environments.sh"
make_server_env SGLang "$here" "${1:-}"
