#!/usr/bin/env bash
# A TPU pod slice as a queued resource of Google Cloud, one process of the trainer on each of its hosts:
#
#   bash launch/tpu.sh create v5p-32                     asks for the slice; it is there when `status` says ACTIVE
#   bash launch/tpu.sh setup                             clones this repository's `origin` on every host, and installs
#   bash launch/tpu.sh run --config=configs/polaris.py:v5p-32 [--config.KEY=VALUE ...]     the doctor's short form first
#   bash launch/tpu.sh status | stop | delete            stop: SIGTERM, on which the run saves after its step
#
# The hosts find each other (hosts.coordinator=auto). They need one folder in common, for workdir, base.cache_dir and
# compilation_cache: set SHARED to where it is mounted on all of them (Filestore, or a bucket by gcsfuse). SGLang does not
# run on TPUs: rollouts come from JetStream inside the trainer, and judge.url names a judge that runs elsewhere.
#
# Settings, as environment variables: NAME (of the slice), ZONE, SHARED, RUNTIME (version of the TPU's software), and
# BRANCH of the repository.
set -euo pipefail
name=${NAME:-poly-epo} shared=${SHARED:-/mnt/shared}
action=${1:-}
shift || true
if [[ " create setup run status stop delete " != *" $action "* ]]; then
  sed -n '2,/^set /{s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
zone=${ZONE:?is not set; name the zone of the slice, for example us-east5-a}

everywhere() { gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"; }

case $action in
  create)
    gcloud compute tpus queued-resources create "$name" --node-id="$name" --zone="$zone" \
      --accelerator-type="${1:?name the slice, for example v5p-32}" --runtime-version="${RUNTIME:-v2-alpha-tpuv5}"
    ;;
  setup)
    everywhere "git clone --branch=${BRANCH:-main} $(git remote get-url origin) poly_epo_jax && cd poly_epo_jax &&
      source launch/setup_env.sh '[tpu,jetstream]' && bash third_party/jetstream/setup.sh"
    ;;
  run)
    # The file first, then defaults that the user's flags may override.
    printf -v flags '%q ' "${1:?give --config=FILE first}" --config.hosts.coordinator=auto --config.rollouts.name=jetstream \
      --config.workdir="$shared/$name" --config.base.cache_dir="$shared/base" \
      --config.compilation_cache="$shared/compiled" "${@:2}"
    commands="python -m poly_epo_jax.doctor --short $flags && python -m poly_epo_jax.main $flags"
    everywhere "cd poly_epo_jax && source .venv/bin/activate && $commands"
    ;;
  status) gcloud compute tpus queued-resources describe "$name" --zone="$zone" --format='value(state.state)' ;;
  stop) everywhere "pkill -TERM --full 'poly_epo_jax.(doctor|main)'" ;;
  delete) gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force ;;
esac
