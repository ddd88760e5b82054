#!/usr/bin/env bash
# Trains GRPO and Poly-EPO on Countdown from the same base policy, samples 256 responses to each of 200 held-out problems
# from all three policies, and draws their pass@k. It takes about four minutes on two CPU cores, including installation.
# A second call resumes unfinished runs.
#
#   bash launch/quickstart.sh [--config.KEY=VALUE ...]     flags apply to all commands, e.g. --config.train.num_steps=20
#
# With another number of steps, the learning rate has another schedule, so the folders are separate, such as
# runs/evaluation-20-steps. A change of the base policy or of the task requires another clone or the removal of runs/.
source "$(dirname "$0")/help.sh"
source "$(dirname "$0")/setup_env.sh" "[train]"

steps=$(printf '%s\n' "$@" | sed -n 's/^--config\.train\.num_steps=//p' | tail -n 1)
suffix=${steps:+-$steps-steps}
base=runs/models/base grpo=runs/countdown$suffix-grpo poly_epo=runs/countdown$suffix-poly_epo
python -m poly_epo_jax.fit_base --config=configs/countdown.py --output=$base "$@"
python -m poly_epo_jax.main --config=configs/countdown.py:grpo --config.workdir="$grpo" "$@"
python -m poly_epo_jax.main --config=configs/countdown.py:poly_epo --config.workdir="$poly_epo" "$@"
python -m poly_epo_jax.evaluate --config=configs/countdown.py --benchmarks=countdown --models="grpo=$grpo,poly_epo=$poly_epo,base=$base" \
  --num_generations=256 --output="runs/evaluation$suffix" "$@"
python -m poly_epo_jax.report "runs/evaluation$suffix" "$grpo" "$poly_epo" --models=grpo,poly_epo,base --output "runs/report$suffix"
