#!/usr/bin/env bash
# Trains Poly-EPO and GRPO on polynomial solving, with the same base policy and the same number of updates, and compares
# them. It takes four to seven minutes on two CPU cores, including installation. A second call resumes unfinished runs.
#
#   bash launch/quickstart.sh [--config.KEY=VALUE ...]     flags apply to both runs, e.g. --config.train.num_steps=20
#
# With another number of steps, the learning rate has another schedule, so the runs are separate: runs/*-20-steps.
source "$(dirname "$0")/help.sh"
source "$(dirname "$0")/setup_env.sh" "[train]"

steps=$(printf '%s\n' "$@" | sed -n 's/^--config\.train\.num_steps=//p' | tail -n 1)
name() { echo "runs/$1${steps:+-$steps-steps}"; }
for method in poly_epo grpo; do
  python -m poly_epo_jax.main --config="configs/polynomial.py:$method" --config.workdir="$(name "polynomial-$method")" "$@"
done
python -m poly_epo_jax.report "$(name polynomial-poly_epo)" "$(name polynomial-grpo)" --output "$(name report)"
