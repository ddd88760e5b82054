#!/usr/bin/env bash
# Manages a TPU pod slice as a queued resource of Google Cloud, with one trainer process per host:
#
#   bash launch/tpu.sh create v5p-32             requests the slice; it is ready when `status` prints ACTIVE
#   bash launch/tpu.sh setup                     clones the `origin` of this repository on all hosts, and installs it
#   bash launch/tpu.sh run --config=configs/polaris.py:v5p-32 [--config.KEY=VALUE ...]     doctor --short, then training
#   bash launch/tpu.sh status | stop | delete    stop sends SIGTERM; the run completes its step and saves
#
# The hosts detect each other (hosts.coordinator_address=auto). They require a shared folder for workdir, base.cache_dir and
# compilation_cache_dir: set SHARED to its mount point, which must be the same on all hosts (Filestore, or a bucket with
# gcsfuse). SGLang does not run on TPUs: JetStream generates inside the trainer, and judge.url must be the URL of
# a judge on another machine.
#
# Environment variables: NAME (of the slice), ZONE, SHARED, RUNTIME (version of the TPU software), and BRANCH (of the
# repository).
set -euo pipefail
name=${NAME:-poly-epo} shared=${SHARED:-/mnt/shared}
action=${1:-}
shift || true
if [[ " create setup run status stop delete " != *" $action "* ]]; then
  sed -n '2,/^set /{s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
zone=${ZONE:?is not set; set it to the zone of the slice, for example us-east5-a}

everywhere() { gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"; }

case $action in
  create)
    gcloud compute tpus queued-resources create "$name" --node-id="$name" --zone="$zone" \
      --accelerator-type="${1:?is missing; append the slice type, e.g. v5p-32}" \
      --runtime-version="${RUNTIME:-v2-alpha-tpuv5}"
    ;;
  setup)
    everywhere "git clone --branch=${BRANCH:-main} $(git remote get-url origin) poly_epo_jax && cd poly_epo_jax &&
      source launch/setup_env.sh '[tpu,jetstream]' && bash third_party/jetstream/setup.sh"
    ;;
  run)
    # Flags of the user come last, because they override these defaults.
    printf -v flags '%q ' "${1:?is missing; append --config=FILE first}" \
      --config.hosts.coordinator_address=auto --config.rollouts.name=jetstream \
      --config.workdir="$shared/$name" --config.base.cache_dir="$shared/base" \
      --config.compilation_cache_dir="$shared/compiled" "${@:2}"
    commands="python -m poly_epo_jax.doctor --short $flags && python -m poly_epo_jax.main $flags"
    everywhere "cd poly_epo_jax && source .venv/bin/activate && $commands"
    ;;
  status) gcloud compute tpus queued-resources describe "$name" --zone="$zone" --format='value(state.state)' ;;
  stop) everywhere "pkill -TERM --full 'poly_epo_jax.(doctor|main)'" ;;
  delete) gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force ;;
esac
