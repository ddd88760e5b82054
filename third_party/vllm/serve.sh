#!/usr/bin/env bash
# Serves a model with vLLM. Additional flags of `vllm serve` override the defaults below.
#
#   bash third_party/vllm/serve.sh gpu|cpu MODEL PORT [flags]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 3 ] || { echo "Usage: bash third_party/vllm/serve.sh gpu|cpu MODEL PORT [flags]" >&2; exit 2; }
device=$1 model=$2 port=$3
shift 3
compgen -G "$here/env-$device/installed-*" >/dev/null || {
  echo "Error: vLLM is not installed for $device; run: bash third_party/vllm/setup.sh $device" >&2
  exit 1
}
# Only the development mode has the routes that update weights, and only --enable-scale-out those that generate from token
# ids. Log-probabilities are divided by the temperature, as in the loss, only if they are processed. Prompt token details
# are the numbers of cached tokens, which reveal a cache that an update has not emptied.
export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1
flags=(--host 127.0.0.1 --port "$port" --enable-scale-out --logprobs-mode processed_logprobs
  --enable-prompt-tokens-details)
if [ "$device" = cpu ]; then
  # float32 weights and KV cache make log-probabilities comparable with the trainer's. A second thread would busy-wait and
  # occupy a core that other servers and the trainer need. Without "nobind", all servers would run on the same core. The
  # cache takes 1 GB, and the context length is reduced if it exceeds the cache. A request with a seed whose prompt is split
  # into chunks would terminate the server: "CPU Generator does not use offset".
  export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
  flags+=(--dtype float32 --enforce-eager --max-model-len auto --no-enable-chunked-prefill)
else
  export PATH=$here/env-$device/bin:$PATH # contains ninja, with which libraries of vLLM compile kernels
fi
exec "$here/env-$device/bin/python" "$here/env-$device/bin/vllm" serve "$model" "${flags[@]}" "$@"
