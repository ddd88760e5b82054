#!/usr/bin/env bash
# One H200 and the real Qwen3-4B shape in bf16: bash benchmarks/h200.sh   (SMALL=1: a tiny policy, on any machine)
# Sequences of up to 5,120 tokens; microbatches of 16k and 32k tokens, both attention kernels, 64 to 512 slots of the
# embedded sampler. Each is a plan of the memory, and beside it what a run of poly_epo_jax.bench holds and how long it takes;
# the figures are kept under runs/h200/.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] && source .venv/bin/activate
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92

bench() { # name, then settings
  echo "== $1"
  python -m poly_epo_jax.bench --plan --output="runs/h200/$1-plan.json" "${@:2}"
  python -m poly_epo_jax.bench --output="runs/h200/$1.json" "${@:2}"
}

if [ -n "${SMALL:-}" ]; then
  settings=(--config=configs/polynomial.py --config.train.prompts_per_batch=8 --config.train.prompts_per_minibatch=4)
  row_tokens="64 128" kernels="blockwise" slots="16 32"
else
  settings=(--config=configs/polaris.py --config.mesh.fsdp=1 --config.rollouts.name=embedded)
  row_tokens="16384 32768" kernels="triton blockwise" slots="64 128 256 512"
fi
for tokens in $row_tokens; do
  for kernel in $kernels; do
    # Rollouts by servers that are not asked: only the update is timed.
    bench "update-$tokens-$kernel" "${settings[@]}" --config.rollouts.name=sglang --config.rollouts.weight_sync=tensor \
      --config.train.row_tokens="$tokens" --config.train.rows_per_device=1 --config.model.attention="$kernel" \
      --config.rollouts.urls=http://127.0.0.1:1
  done
done
for rows in $slots; do
  bench "decode-$rows" "${settings[@]}" --config.rollouts.max_concurrent="$rows" \
    --config.train.row_tokens="${row_tokens%% *}" --config.train.rows_per_device=1
done
