#!/usr/bin/env bash
# Manages a TPU pod slice as a queued resource of Google Cloud, with one trainer process per host:
#
#   bash launch/tpu.sh create v5p-32             requests the slice; it is ready when `status` prints ACTIVE
#   bash launch/tpu.sh setup                     copies this working tree to all hosts, and installs it, with Python
#                                                3.12 if the host has no supported version
#   bash launch/tpu.sh run --config=configs/polaris.py:v5p-32 [--config.KEY=VALUE ...]
#                                                copies it again, and runs doctor --short; then starts training, which
#                                                continues if the connection is closed
#   bash launch/tpu.sh keep v5p-32 --config=...  creates the slice if it is missing, and runs `setup` and `run`; repeats this
#                                                after each preemption, until the run has ended. End it before `stop`.
#   bash launch/tpu.sh log                       follows the output of the first host
#   bash launch/tpu.sh status | stop | delete    stop sends SIGTERM; the run completes its step and saves
#
# The working tree includes uncommitted changes and new files, but no files that git ignores. The hosts detect each other
# (hosts.coordinator_address=auto). They require a shared folder for workdir, base.cache_dir and compilation_cache_dir:
# set SHARED to its mount point, which must be the same on all hosts (Filestore, or a bucket with gcsfuse).
#
# SGLang does not run on TPUs: the embedded sampler generates inside the trainer. If judge.name=llm, as in
# configs/polaris.py, set JUDGE_URL to the address of a judge on another machine, which is started there with:
#
#   bash third_party/sglang/setup.sh gpu
#   bash third_party/sglang/serve.sh gpu Qwen/Qwen3-4B-Instruct-2507 30010 --host 0.0.0.0 \
#     --constrained-json-disable-any-whitespace
#
# Environment variables: NAME (of the slice), ZONE, SHARED, JUDGE_URL, RUNTIME (version of the TPU software; default: that
# of the type), SPOT=1 (requests a slice that costs less and may be preempted), and PREPARE, a command that `run` executes
# on all hosts first, for example to mount the shared folder on new or restarted hosts:
#
#   PREPARE='mountpoint -q /mnt/shared || { sudo mkdir -p /mnt/shared && sudo mount 10.0.0.2:/share /mnt/shared; }'
#
# With several hosts, gcloud requires the key in an ssh-agent: ssh-add ~/.ssh/google_compute_engine
source "$(dirname "$0")/help.sh"
set -euo pipefail
name=${NAME:-poly-epo} shared=${SHARED:-/mnt/shared} log=poly_epo_jax.log
action=${1:-}
shift || true
if [[ " create setup run keep log status stop delete " != *" $action "* ]]; then
  bash "$0" --help >&2
  exit 2
fi
zone=${ZONE:?is not set; set it to the zone of the slice, for example us-east5-a}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

idle="! pgrep --full 'poly_epo_jax.(doctor|main)'" # command that fails on a host with a run in progress
state() { # prints nothing if there is no such slice
  gcloud compute tpus queued-resources list --zone="$zone" --filter="name ~ /$name\$" --format='value(state.state)'
}

on() { gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker="$1" --command="$2"; } # WORKER COMMAND

copy() { # copies the working tree to all hosts, and removes files there that it no longer contains
  local folder file
  folder=$(mktemp -d)
  git ls-files -z --cached --others --exclude-standard | while IFS= read -rd '' file; do
    if [ -f "$file" ] || [ -L "$file" ]; then printf '%s\0' "$file"; fi # tracked files may have been deleted
  done | tar --null --files-from=- -czf "$folder/poly_epo_jax.tar.gz"
  gcloud compute tpus tpu-vm scp "$folder/poly_epo_jax.tar.gz" "$name:" --zone="$zone" --worker=all
  rm -r "$folder"
  on all "mkdir -p poly_epo_jax && cd poly_epo_jax && touch ../poly_epo_jax.files &&
    xargs -d '\n' rm -f <../poly_epo_jax.files && tar -xzvf ../poly_epo_jax.tar.gz >../poly_epo_jax.files"
}

case $action in
  create)
    type=${1:?is missing; append the slice type, e.g. v5p-32}
    case $type in
      v4-*) runtime=tpu-ubuntu2204-base ;;
      v5e-*) type=v5litepod-${type#*-} runtime=v2-alpha-tpuv5-lite ;; # the name of a v5e in Google Cloud
      v5p-*) runtime=v2-alpha-tpuv5 ;;
      v6e-*) runtime=v2-alpha-tpuv6e ;;
      *) runtime=${RUNTIME:?is not set; set it to the version of the TPU software for $type} ;;
    esac
    gcloud compute tpus queued-resources create "$name" --node-id="$name" --zone="$zone" --accelerator-type="$type" \
      --runtime-version="${RUNTIME:-$runtime}" ${SPOT:+--spot}
    ;;
  setup)
    copy
    # Images with the software for TPUs may only have Python 3.10.
    on all "export PATH=\$HOME/.local/bin:\$PATH &&
      { command -v python3.13 python3.12 python3.11 || { python3 -m pip install uv && uv python install 3.12; }; } &&
      cd poly_epo_jax && source launch/setup_env.sh '[tpu]'"
    ;;
  run)
    # Flags of the user come last, because they override these defaults. An empty judge.url is rejected if the judge is
    # a server, because the addresses in configs/ are local.
    printf -v flags '%q ' "${1:?is missing; append --config=FILE first}" \
      --config.hosts.coordinator_address=auto --config.rollouts.name=embedded --config.judge.url="${JUDGE_URL:-}" \
      --config.workdir="$shared/$name" --config.base.cache_dir="$shared/base" \
      --config.compilation_cache_dir="$shared/compiled" "${@:2}"
    on all "$idle" || {
      echo "Error: a run is in progress on $name, or a host cannot be reached; end it with: bash launch/tpu.sh stop" >&2
      exit 1
    }
    [ -z "${PREPARE:-}" ] || on all "$PREPARE"
    copy
    enter="cd poly_epo_jax && source .venv/bin/activate"
    on all "$enter && python -m poly_epo_jax.doctor --short $flags"
    on all "$enter && { nohup setsid python -m poly_epo_jax.main $flags >../$log 2>&1 </dev/null & }"
    echo "Training has started; follow it with: bash launch/tpu.sh log"
    ;;
  keep)
    type=${1:?is missing; append the slice type, e.g. v5p-32, and --config=FILE}
    shift
    while :; do
      case $(state || echo UNKNOWN) in
        "") bash launch/tpu.sh create "$type" ;;
        SUSPENDED | FAILED) bash launch/tpu.sh delete ;; # preempted: a queued resource is not restored, but replaced
        ACTIVE)
          if on 0 "[ ! -e $log ]"; then # a new slice
            { bash launch/tpu.sh setup && bash launch/tpu.sh run "$@"; } || [ "$(state)" != ACTIVE ]
          elif on 0 "grep -q 'SIGTERM: .*Rerun the command' $log" && on all "$idle"; then # saved before a reboot
            bash launch/tpu.sh run "$@" || [ "$(state)" != ACTIVE ]
          elif on all "$idle" && on 0 "tail -n 20 $log"; then
            on 0 "grep -q ^Done: $log" && exit
            exit 1
          fi
          ;;
      esac
      sleep "${POLL_SECONDS:-60}"
    done
    ;;
  log) on 0 "tail -n 100 -F $log" ;;
  status) gcloud compute tpus queued-resources describe "$name" --zone="$zone" --format='value(state.state)' ;;
  stop) on all "pkill -TERM --full 'poly_epo_jax.(doctor|main)'" ;;
  delete) gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force --quiet ;; # without a question
esac
