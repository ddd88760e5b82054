#!/usr/bin/env bash
# Trains GRPO and Poly-EPO on Countdown from the same base policy, samples 256 responses to each of 200 held-out problems
# from all three policies, and draws their pass@k. It takes about five minutes on two CPU cores, including installation.
# A second call resumes unfinished runs.
#
#   bash launch/quickstart.sh [--config.KEY=VALUE ...]     flags apply to all commands, e.g. --config.train.num_steps=20
source "$(dirname "$0")/setup_env.sh" "[train]"

base=runs/models/base
python -m poly_epo_jax.fit_base --config=configs/countdown.py --output="$base" "$@"
for method in grpo poly_epo; do
  python -m poly_epo_jax.main --config="configs/countdown.py:$method" "$@"
done
python -m poly_epo_jax.evaluate --config=configs/countdown.py --benchmarks=countdown \
  --models="runs/countdown-grpo,runs/countdown-poly_epo,$base" --num_generations=256 --output=runs/evaluation "$@"
python -m poly_epo_jax.report runs/evaluation runs/countdown-grpo runs/countdown-poly_epo \
  --models=countdown-grpo,countdown-poly_epo,base --output runs/report
