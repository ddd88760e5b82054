#!/usr/bin/env bash
# Trains Poly-EPO and GRPO on polynomial solving, with the same base policy and the same number of updates, and compares
# them. It takes four to seven minutes on two CPU cores, including installation. A second call resumes unfinished runs.
#
#   bash launch/quickstart.sh [--config.KEY=VALUE ...]     flags apply to both runs, e.g. --config.train.num_steps=20
source "$(dirname "$0")/setup_env.sh" "[train]"

for method in poly_epo grpo; do
  python -m poly_epo_jax.main --config="configs/polynomial.py:$method" "$@"
done
python -m poly_epo_jax.report runs/polynomial-poly_epo runs/polynomial-grpo --output runs/report
