#!/usr/bin/env bash
# Trains every method at several learning rates and seeds, each run on one core, and draws where they end up.
#
#   bash launch/sweep.sh FOLDER CONFIG "RATES" "SEEDS" [--config.KEY=VALUE ...]
#
# The figures of docs/synthetic.md:
#   bash launch/sweep.sh runs/frontier       configs/polynomial.py     "1e-4 2.5e-4 5e-4 1e-3" "0 1 2"
#   bash launch/sweep.sh runs/skewed         configs/polynomial.py     "5e-4"                  "0" --config.base.skew=0.5
#   bash launch/sweep.sh runs/multiplication configs/multiplication.py "5e-4"                  "0"
# Finished runs are left alone and broken-off ones resumed, so the same command can simply be repeated.
source "$(dirname "$0")/setup_env.sh" ""
[ $# -ge 4 ] || { echo "Usage: bash launch/sweep.sh FOLDER CONFIG RATES SEEDS [--config.KEY=VALUE ...]" >&2; exit 2; }
folder=$1 config=$2 rates=$3 seeds=$4
shift 4
lanes=$(nproc)

run() { # METHOD RATE SEED LANE FLAGS...
  local out=$folder/$1-lr$2-seed$3 core=()
  local settings=(--config="$config:$1" --config.optimizer.learning_rate="$2" --config.seed="$3" --config.workdir="$out")
  if command -v taskset >/dev/null; then core=(taskset -c "$4"); fi
  shift 4
  [ ! -e "$out/done" ] || return 0
  mkdir -p "$out"
  "${core[@]}" python -m poly_epo_jax.main "${settings[@]}" --config.eval.every=50 "$@" >"$out/log.txt" 2>&1 || {
    echo "Error: $out failed; see $out/log.txt" >&2
    return 1
  }
  touch "$out/done"
  echo "$out"
}

lane() { # LANE FLAGS...: every run whose turn is this lane's
  local lane=$1 index=0
  shift
  for seed in $seeds; do
    for rate in $rates; do
      for method in poly_epo grpo grpo_div; do
        if [ $((index++ % lanes)) = "$lane" ]; then run "$method" "$rate" "$seed" "$lane" "$@"; fi
      done
    done
  done
}

# The first run makes the base policy that the others share, so it goes alone.
run poly_epo "${rates%% *}" "${seeds%% *}" 0 "$@"
pids=()
for ((i = 0; i < lanes; i++)); do
  lane "$i" "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
python -m poly_epo_jax.report.frontier "$folder"/{poly_epo,grpo,grpo_div}-*/
