#!/usr/bin/env bash
# Trains Poly-EPO and GRPO on polynomial solving, from the same base policy and with equal updates, and compares them.
# It takes four to seven minutes on two CPU cores, including installation. A second call resumes what the first left
# unfinished.
#
#   bash launch/quickstart.sh [--config.KEY=VALUE ...]     of both runs; --config.train.num_steps=20 is a quick look
source "$(dirname "$0")/setup_env.sh" ""

for method in poly_epo grpo; do
  python -m poly_epo_jax.main --config="configs/polynomial.py:$method" "$@"
done
python -m poly_epo_jax.report runs/polynomial-poly_epo runs/polynomial-grpo --output runs/report
