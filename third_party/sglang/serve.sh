#!/usr/bin/env bash
# Serves a model with SGLang. Additional flags of sglang.launch_server override the defaults below.
#
#   bash third_party/sglang/serve.sh gpu|cpu MODEL PORT [flags]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 3 ] || { echo "Usage: bash third_party/sglang/serve.sh gpu|cpu MODEL PORT [flags]" >&2; exit 2; }
device=$1 model=$2 port=$3
shift 3
python=$here/env-$device/bin/python
compgen -G "$here/env-$device/installed-*" >/dev/null || {
  echo "Error: SGLang is not installed for $device; run: bash third_party/sglang/setup.sh $device" >&2
  exit 1
}
flags=(--model-path "$model" --host 127.0.0.1 --port "$port" --skip-server-warmup)
if [ "$device" = cpu ]; then
  export PYTHONPATH=$here/cpu_shim SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  # float32 weights, KV cache and convolution states make log-probabilities comparable with the trainer's. An idle scheduler
  # or a second thread would busy-wait and occupy a core that other servers and the trainer need. The cache size is limited,
  # because creating a cache for all free memory takes minutes.
  export SGLANG_MAMBA_CONV_DTYPE=float32
  flags+=(--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph --dtype float32
    --mem-fraction-static 0.2 --max-total-tokens 65536 --sleep-on-idle)
else
  # SGLang compiles kernels when it starts. The environment contains ninja, but no complete CUDA toolkit.
  export PATH=$here/env-$device/bin:$PATH
  if ! { command -v "${CUDA_HOME:-${CUDA_PATH:-/usr/local/cuda}}/bin/nvcc" nvcc && command -v "${CXX:-c++}"; } >/dev/null; then
    echo "Error: SGLang requires nvcc and a C++ compiler; install a CUDA 13 toolkit and g++, or set CUDA_HOME and CXX." >&2
    exit 1
  fi
fi
exec "$python" -m sglang.launch_server "${flags[@]}" "$@"
