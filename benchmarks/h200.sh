#!/usr/bin/env bash
# Measures the Qwen3-4B configuration in bf16 on one H200: bash benchmarks/h200.sh
# SMALL=1 uses a tiny policy that runs on any machine.
# Sequences have up to 5,120 tokens. The script varies the microbatch (16k and 32k tokens), the attention kernel, and the
# number of slots of the embedded sampler (64 to 512). For each combination, it writes the memory plan and the memory and
# times measured by poly_epo_jax.bench to runs/h200/.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] && source .venv/bin/activate
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92

bench() { # bench NAME [FLAGS...]
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
    # With rollouts.name=sglang, only the update is measured. The servers are not contacted.
    bench "update-$tokens-$kernel" "${settings[@]}" --config.rollouts.name=sglang --config.rollouts.weight_sync=tensor \
      --config.train.row_tokens="$tokens" --config.train.rows_per_device=1 --config.model.attention="$kernel" \
      --config.rollouts.urls=http://127.0.0.1:1
  done
done
for rows in $slots; do
  bench "decode-$rows" "${settings[@]}" --config.rollouts.max_concurrent="$rows" \
    --config.train.row_tokens="${row_tokens%% *}" --config.train.rows_per_device=1
done
