#!/usr/bin/env bash
# Trains every method at several learning rates and seeds, each run on one core, and draws where they end up.
#
#   bash launch/sweep.sh FOLDER CONFIG "RATES" "SEEDS" [--config.KEY=VALUE ...]
#
# The figures of docs/synthetic.md:
#   bash launch/sweep.sh runs/frontier       configs/polynomial.py     "1e-4 2.5e-4 5e-4 1e-3" "0 1 2"
#   bash launch/sweep.sh runs/skewed         configs/polynomial.py     "5e-4"                  "0 1 2" --config.base.skew=0.5
#   bash launch/sweep.sh runs/multiplication configs/multiplication.py "5e-4"                  "0 1 2"
# Finished runs are left alone and broken-off ones resumed, so the same command can simply be repeated.
source "$(dirname "$0")/setup_env.sh" ""
[ $# -ge 4 ] || { echo "Usage: bash launch/sweep.sh FOLDER CONFIG RATES SEEDS [--config.KEY=VALUE ...]" >&2; exit 2; }
folder=$1 config=$2 rates=$3 seeds=$4
shift 4
export XLA_FLAGS="${XLA_FLAGS:-} --xla_cpu_multi_thread_eigen=false"

run() { # METHOD RATE SEED FLAGS...
  local method=$1 rate=$2 seed=$3 out=$folder/$1-lr$2-seed$3
  shift 3
  [ -e "$out/done" ] && return
  mkdir -p "$out"
  python -m poly_epo_jax.main --config="$config:$method" --config.workdir="$out" --config.seed="$seed" \
    --config.optimizer.learning_rate="$rate" --config.eval.every=50 "$@" >"$out/log.txt" 2>&1 || {
    echo "Error: $out failed; see $out/log.txt" >&2
    return 1
  }
  touch "$out/done" && echo "$out"
}

jobs_at_once=${JOBS:-$(nproc)}
first=yes failed=
for seed in $seeds; do
  for rate in $rates; do
    for method in poly_epo grpo grpo_div; do
      # The first run makes the base policy that the others share, so it goes alone.
      if [ $first ]; then run "$method" "$rate" "$seed" "$@" && first=; continue; fi
      while [ "$(jobs -rp | wc -l)" -ge "$jobs_at_once" ]; do wait -n || failed=yes; done
      run "$method" "$rate" "$seed" "$@" &
    done
  done
done
while [ "$(jobs -rp)" ]; do wait -n || failed=yes; done
[ ! $failed ] || exit 1
python -m poly_epo_jax.frontier "$folder"/*/
