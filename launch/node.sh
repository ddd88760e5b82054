#!/usr/bin/env bash
# Runs all that training with servers needs on one node: policy servers, the judge and the trainer. Made for 4 x H200.
# Before training, the short form of python -m poly_epo_jax.doctor checks devices, kernels, disk, servers and judge; if
# something is wrong with them, its table says what, and nothing is trained.
#
#   bash launch/node.sh                                                     the paper's run; repeated, it resumes
#   bash launch/node.sh --config=configs/polaris.py:grpo --config.seed=1    or any other run, with any other keys
#
#   GPU            0               1               2               3
#   policy server  :30000          :30001          :30002          -
#   judge          -               -               -               :30010
#   trainer        mesh.fsdp=4, a quarter of every weight on each
#
# On-policy training alternates between generating and training, so the two share GPUs without getting in each other's
# way. Of an H200's 141 GB,
#   - the trainer takes 0.36, 51 GB. Weights, gradients and Adam's two moments of Qwen3-4B in float32 take 4.02e9 x 16
#     bytes = 64 GB, 16 GB on each of four GPUs. With full remat, the activations saved for the 16,384 tokens of a
#     device's microbatch take 3 GB; the head, its gradient and a chunk of logits take 6 GB. So bench --plan counts
#     25 GB; the rest is room for more rows.
#   - a policy server takes 0.50, 70 GB: 8 GB of weights in bfloat16 and 62 GB of KV cache. At 147 KB per token, the
#     cache holds 420,000 tokens: all of the server's 341 responses at once while their mean is below 1,200 tokens, or
#     82 of the longest. CUDA graphs and activations take some 6 GB on top. Requests that do not fit wait in the server.
#   - the judge takes as much: a call with 8 responses of 4,096 tokens takes 35,000 tokens of cache, 5 GB; a dozen fit.
# mem-fraction-static counts the memory free while a server starts, so the trainer starts once all servers answer.
# Weights are passed through a folder in /dev/shm: 8 GB per version, with two versions for a moment.
#
# Settings, as environment variables:
#   POLICY               the model to serve and train; default: the configuration's model.path
#   JUDGE                the judge's model; default: the paper's
#   SERVERS              policy servers, on GPUs 0 to SERVERS - 1; default 3, or 1 on CPUs
#   PORT                 of the first policy server, default 30000; the judge's is 10 higher
#   POLICY_FLAGS         more flags for sglang.launch_server; --enable-deterministic-inference makes it heed the seeds of
#                        generations, at a cost in speed
#   JUDGE_FLAGS          the same for the judge
#   LOGS                 folder of the servers' logs; default runs/logs, under SLURM runs/logs/node-N
#   DEVICE=cpu           for a trial without GPUs, in float32
#
# Ctrl-C or SIGTERM stops everything. A trainer that is already training first abandons its batch, saves, and exits with
# 143; a second Ctrl-C gives up that step and saves the steps before it. So does the end of a server, with exit code 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/processes.sh
device=${DEVICE:-gpu} port=${PORT:-30000} logs=${LOGS:-runs/logs${SLURM_NODEID:+/node-$SLURM_NODEID}}
case $device in
  gpu) extra='[gpu]' servers=${SERVERS:-3} ;;
  cpu) extra='' servers=${SERVERS:-1} ;;
  *) echo "Error: DEVICE=$device is neither gpu nor cpu." >&2; exit 2 ;;
esac

answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
declare -A port_of=([judge]=$((port + 10)))
for ((i = 0; i < servers; i++)); do port_of[policy-$i]=$((port + i)); done
for taken in "${port_of[@]}"; do
  answers "$taken" || continue
  echo "Error: port $taken is taken; stop what listens there, or set PORT to another port." >&2
  exit 1
done

# Signals are only noted here, and checked for between the steps below, so that none interrupts between the start of a
# process and the recording of its id.
signals=0 code=0 told=0
trap 'signals=$((signals + 1)) code=130' INT
trap 'signals=$((signals + 1)) code=143' TERM HUP
weights=$(mktemp -d /dev/shm/poly_epo_jax.XXXXXX)
# shellcheck disable=SC2329
finish() {
  stop 15 "${!pid_of[@]}"
  remove_leftovers
  rm -rf "$weights"
  [ "$signals" -le "$told" ] || exit "$code"
}
trap finish EXIT
look() { # ends this script after a signal, otherwise waits for a moment
  [ "$signals" = 0 ] || exit "$code"
  sleep 0.5 || true
}

# shellcheck disable=SC2016
start setup bash -c 'source launch/setup_env.sh "$0"; bash third_party/sglang/setup.sh "$1"' "$extra" "$device"
while is_running setup; do look; done
wait "${pid_of[setup]}"
source launch/setup_env.sh "$extra"

# Placed right after the file, so that the user's flags come later and take precedence.
ours=(--config.rollouts.weights_dir="$weights" --config.judge.url="http://127.0.0.1:${port_of[judge]}")
urls=
for ((i = 0; i < servers; i++)); do urls+=,http://127.0.0.1:$((port + i)); done
ours+=(--config.rollouts.urls="${urls:1}")
# The servers answer by the time the trainer starts, and one that ends is not started again.
ours+=(--config.rollouts.wait_seconds=20 --config.judge.wait_seconds=20)
if [ "$device" = cpu ]; then ours+=(--config.model.dtype=float32 --config.rollouts.weights_dtype=float32); fi
if [ -n "${POLICY:-}" ]; then ours+=(--config.model.path="$POLICY"); fi
[[ " $* " == *" --config="* ]] || set -- --config=configs/polaris.py "$@"
flags=()
for flag in "$@"; do
  flags+=("$flag")
  if [[ $flag == --config=* ]]; then flags+=("${ours[@]}"); fi
done
# Reading the configuration here reports an invalid value before servers start.
policy=$(python - "${flags[@]}" <<<'
import sys
from poly_epo_jax.startup.command_line import config_parser, run_command
sys.exit(run_command(config_parser(None), None, lambda config, _: print(config.model.path)))')
[ -n "$policy" ] || { echo "Error: the configuration has no model.path; name a model with POLICY=..." >&2; exit 1; }

serve() { # NAME GPU MODEL FLAGS...
  local name=$1 gpu=$2 model=$3 log=$logs/$1.log flags=()
  shift 3
  if [ "$device" = gpu ]; then flags=(--base-gpu-id "$gpu" --mem-fraction-static 0.50); fi
  echo "$name: $model on port ${port_of[$name]}, log in $log"
  start "$name" bash third_party/sglang/serve.sh "$device" "$model" "${port_of[$name]}" "${flags[@]}" "$@" >"$log" 2>&1
}
last_error() { # LOG: the line that names the error, ignoring lines from before the server was ready
  local since
  since=$(tac "$1" | sed '/ready to roll/Q')
  grep -m 1 -E '^[A-Za-z_.]*(Error|Exception)(:|$)|error:|ERROR' <<<"$since" || grep -m 1 . <<<"$since" || echo "no word"
}
check_servers() { # WHEN: whether all servers are running; reports one that is not
  local name code=0
  for name in "${!port_of[@]}"; do
    is_running "$name" && continue
    wait "${pid_of[$name]}" || code=$?
    echo "Error: $name ended with code $code $1: $(last_error "$logs/$name.log"); see $logs/$name.log" >&2
    return 1
  done
}

mkdir -p "$logs"
for ((i = 0; i < servers; i++)); do
  # shellcheck disable=SC2086
  serve "policy-$i" "$i" "$policy" ${POLICY_FLAGS:-}
done
# shellcheck disable=SC2086
serve judge "$servers" "${JUDGE:-Qwen/Qwen3-4B-Instruct-2507}" --constrained-json-disable-any-whitespace ${JUDGE_FLAGS:-}
for name in "${!port_of[@]}"; do
  until answers "${port_of[$name]}"; do
    note_leftovers "$name"
    check_servers "before it answered"
    look
  done
done
note_leftovers "${!port_of[@]}"

export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.36}
look
start doctor python -m poly_epo_jax.doctor --short "${flags[@]}"
while is_running doctor; do
  look
  check_servers "while the doctor looked"
done
wait "${pid_of[doctor]}" || exit 1
look
start trainer python -m poly_epo_jax.main "${flags[@]}"
failed=0
while is_running trainer; do
  sleep 0.5 || true
  if ((told == 0 && signals > 0)); then
    told=$signals
    echo "The trainer completes its update and saves; a second Ctrl-C or SIGTERM gives that up." >&2
    kill -TERM "${pid_of[trainer]}" || true
  elif ((told == 0)) && ! check_servers "while the trainer ran"; then
    failed=1 told=1
    kill -TERM "${pid_of[trainer]}" || true
    break
  elif ((signals > told)); then
    failed=$code told=$signals
    break
  fi
done
# Without servers, the trainer cannot complete the step, and saves the steps before it.
[ "$failed" = 0 ] || stop 5 "${!port_of[@]}"
code=0
wait "${pid_of[trainer]}" || code=$?
[ "$failed" = 0 ] || exit "$failed"
exit "$code"
