#!/usr/bin/env bash
# Runs policy servers, the judge and the trainer on one node: a policy server on every visible GPU except for the last
# one, which runs the judge. Before training, the short form of python -m poly_epo_jax.doctor tests devices, kernels,
# disk, servers and judge. If a test fails, its table shows the reason and training does not start.
#
#   bash launch/node.sh                                                     the paper's run; a second call resumes it
#   bash launch/node.sh --config=configs/polaris.py:grpo --config.seed=1    another run, with any configuration keys
#   SERVER=vllm bash launch/node.sh                                         the same with vLLM instead of SGLang
#
# With 4 x H200, for which the paper's run is configured:
#
#   GPU            0               1               2               3
#   policy server  :30000          :30001          :30002          -
#   judge          -               -               -               :30010
#   trainer        mesh.fsdp=4: each GPU holds a quarter of every weight
#
# Servers and trainer share GPUs, because on-policy training alternates between generation and training. The 141 GB of
# an H200 are divided as follows:
#   - Trainer: fraction 0.36, 51 GB. The float32 weights, gradients and two Adam moments of Qwen3-4B take 4.02e9 x 16
#     bytes = 64 GB, 16 GB on each of the four GPUs. model.remat=auto selects "attention", which saves activations of
#     8 GB per device for the 16,384 tokens of a microbatch. The head, its gradient and a chunk of logits take 6 GB. The
#     total of bench --plan is 30 GB. With the GPU for itself, the trainer would use "dots" and 63 GB.
#   - Policy server: fraction 0.50, 70 GB, with 8 GB of bfloat16 weights and 62 GB of KV cache. At 147 KB per token, the
#     cache holds 420,000 tokens: all 341 concurrent responses of the server if their mean length is below 1,200 tokens,
#     or 82 responses of maximum length. CUDA graphs and activations take about 6 GB more. Other requests are queued.
#   - Judge: fraction 0.50. A request with 8 responses of 4,096 tokens takes 35,000 tokens of cache, 5 GB, so about 12
#     requests fit.
# SGLang's fraction is a fraction of the memory that is free when a server starts, and vLLM's must be free then, so the
# trainer starts after all servers respond. Weights are transferred through a folder in /dev/shm, with 8 GB per version
# and at most two versions.
#
# Environment variables:
#   SERVER               kind of all servers: sglang (default) or vllm
#   POLICY               model to serve and train; default: model.path of the configuration
#   JUDGE                model of the judge; default: the judge of the paper
#   JUDGE_URL            address of a judge on another machine; no judge is started here. Start the judge there with:
#                          bash third_party/sglang/serve.sh gpu Qwen/Qwen3-4B-Instruct-2507 30010 --host 0.0.0.0 \
#                            --constrained-json-disable-any-whitespace
#   CUDA_VISIBLE_DEVICES GPUs to use; default: all GPUs of the node
#   SERVERS              number of policy servers, on the first visible GPUs; default: all GPUs, without that of the judge
#                        (1 on CPU)
#   PORT                 port of the first policy server; default: 30000. The port of the judge is PORT + 10 or, with more
#                        than ten policy servers, the next one
#   POLICY_FLAGS         additional flags of sglang.launch_server or vllm serve for policy servers. SGLang respects the
#                        seeds of generations only with --enable-deterministic-inference, which makes it slower
#   JUDGE_FLAGS          additional flags of sglang.launch_server or vllm serve for the judge
#   LOGS                 folder of the server logs; default: runs/logs, or runs/logs/job-ID/node-N with SLURM
#   DEVICE=cpu           test without GPUs, in float32. On CPUs, vLLM does not update output heads that share the weight
#                        of the embedding, so an untied copy of the policy in LOGS is served and trained
#
# Ctrl-C or SIGTERM stops all processes. A trainer that is already training discards its unfinished batch, saves, and
# exits with code 143. A second Ctrl-C discards the current step and saves the previous steps, as does the failure of a
# server, with exit code 1.
source "$(dirname "$0")/help.sh"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/processes.sh
for program in ps setsid; do # without them, servers could not be stopped
  command -v "$program" >/dev/null || { echo "Error: $program was not found; install procps and util-linux." >&2; exit 1; }
done
device=${DEVICE:-gpu} server=${SERVER:-sglang} port=${PORT:-30000}
logs=${LOGS:-runs/logs${SLURM_JOB_ID:+/job-$SLURM_JOB_ID}${SLURM_NODEID:+/node-$SLURM_NODEID}}
visible_gpus() { # prints their number
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true
  else
    nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true
  fi
}
# All differences between the kinds of servers: flags of a server on a GPU, whose index is appended, flags of the judge,
# and a line in the log of a server that is ready.
case $server in
  sglang)
    gpu_flags=(--mem-fraction-static 0.50 --base-gpu-id) ready='ready to roll'
    judge_flags=(--constrained-json-disable-any-whitespace)
    ;;
  vllm)
    gpu_flags=(--gpu-memory-utilization 0.50 --device-ids) ready='Application startup complete'
    judge_flags=(--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}')
    ;;
  *) echo "Error: SERVER must be sglang or vllm, but is $server." >&2; exit 2 ;;
esac
judges=1
[ -z "${JUDGE_URL:-}" ] || judges=0
case $device in
  gpu)
    extra='[gpu]' gpus=$(visible_gpus)
    servers=${SERVERS:-$((gpus > judges ? gpus - judges : 1))}
    if ((servers + judges > gpus)); then
      echo "Error: $servers policy server(s) and $judges judge(s) require a GPU each, but $gpus are visible; lower SERVERS," \
        "set JUDGE_URL to a judge on another machine, or set DEVICE=cpu for a test without GPUs." >&2
      exit 1
    fi
    # By default, JAX assigns only one GPU to each task of a SLURM job.
    if [ "${SLURM_NNODES:-1}" -gt 1 ]; then
      JAX_LOCAL_DEVICE_IDS=$(seq --separator=, 0 $((gpus - 1)))
      export JAX_LOCAL_DEVICE_IDS
    fi
    ;;
  cpu) extra='[train]' servers=${SERVERS:-1} ;;
  *) echo "Error: DEVICE must be gpu or cpu, but is $device." >&2; exit 2 ;;
esac

# Without a subshell: bash 5.2 may hang if it receives a signal with a handler while it creates one.
is_listening() { { : <>"/dev/tcp/127.0.0.1/$1"; } 2>/dev/null; }
declare -A port_of=()
[ "$judges" = 0 ] || port_of[judge]=$((port + (servers > 10 ? servers : 10)))
for ((i = 0; i < servers; i++)); do port_of[policy-$i]=$((port + i)); done
for taken in "${port_of[@]}"; do
  is_listening "$taken" || continue
  echo "Error: port $taken is in use; stop the process that listens on it, or set PORT to another port." >&2
  exit 1
done

# Signal handlers only count signals, and the steps below check the count. A signal can therefore not interrupt between
# the start of a process and the recording of its id. `handled` is the number of signals that were acted upon.
signals=0 code=0 handled=0
trap 'signals=$((signals + 1)) code=130' INT
trap 'signals=$((signals + 1)) code=143' TERM HUP
weights=$(mktemp -d /dev/shm/poly_epo_jax.XXXXXX)
# shellcheck disable=SC2329
finish() {
  stop 15 "${!pid_of[@]}"
  remove_leftovers
  rm -rf "$weights"
  [ "$signals" -le "$handled" ] || exit "$code"
}
trap finish EXIT
check_signals() { # exits after a signal, otherwise waits 0.5 s
  [ "$signals" = 0 ] || exit "$code"
  sleep 0.5 || true
}

# Servers, which support only one version of Python, are set up first, so that a missing version is reported at once.
# shellcheck disable=SC2016
start setup bash -c 'bash "third_party/$2/setup.sh" "$1" && source launch/setup_env.sh "$0"' "$extra" "$device" "$server"
while is_running setup; do check_signals; done
wait "${pid_of[setup]}"
source launch/setup_env.sh "$extra"

# These flags are inserted after --config, so that flags of the user come later and override them.
own_flags=(--config.rollouts.name="$server" --config.rollouts.weights_dir="$weights")
own_flags+=(--config.judge.url="${JUDGE_URL:-http://127.0.0.1:${port_of[judge]:-}}")
urls=
for ((i = 0; i < servers; i++)); do urls+=,http://127.0.0.1:$((port + i)); done
own_flags+=(--config.rollouts.urls="${urls:1}")
# Servers respond before the trainer starts, and failed servers are not restarted, so long waits are not useful.
own_flags+=(--config.rollouts.wait_seconds=20 --config.judge.wait_seconds=20)
if [ "$device" = cpu ]; then own_flags+=(--config.model.dtype=float32 --config.rollouts.weights_dtype=float32); fi
if [ -n "${POLICY:-}" ]; then own_flags+=(--config.model.path="$POLICY"); fi
[[ " $* " == *" --config="* ]] || set -- --config=configs/polaris.py "$@"
flags=()
for flag in "$@"; do
  flags+=("$flag")
  if [[ $flag == --config=* ]]; then flags+=("${own_flags[@]}"); fi
done
# Reading the configuration here reports invalid values before servers start.
policy=$(python - "${flags[@]}" <<<'
import sys
from poly_epo_jax.startup.command_line import config_parser, run_command
sys.exit(run_command(config_parser(None), None, lambda config, _: print(config.model.path)))')
[ -n "$policy" ] || { echo "Error: model.path is empty; set POLICY to a model." >&2; exit 1; }
mkdir -p "$logs"
if [ "$device" = cpu ] && [ "$server" = vllm ]; then
  policy=$(python launch/untied.py "$policy" "$logs/untied")
  flags+=(--config.model.path="$policy")
fi

serve() { # NAME GPU MODEL FLAGS...
  local name=$1 gpu=$2 model=$3 log=$logs/$1.log flags=()
  shift 3
  if [ "$device" = gpu ]; then flags=("${gpu_flags[@]}" "$gpu"); fi
  echo "$name: $model on port ${port_of[$name]}, log in $log"
  start "$name" bash "third_party/$server/serve.sh" "$device" "$model" "${port_of[$name]}" "${flags[@]}" "$@" >"$log" 2>&1
}
last_error() { # LOG: prints the line with the error message; lines before the server was ready are ignored
  local since
  # Lines of vLLM start with process, level and time. Its last errors refer to the error of another process above.
  since=$(tac "$1" | sed -E "/$ready/Q; s/^\([A-Za-z0-9_]+ pid=[0-9]+\) (ERROR [^]]*\] )?//; /initialization failed/d")
  grep -m 1 -E '^[A-Za-z_.]*(Error|Exception)(:|$)|error:|ERROR' <<<"$since" || grep -m 1 . <<<"$since" ||
    echo "no output"
}
check_servers() { # WHEN: succeeds if all servers are running, otherwise prints the error of one that is not
  local name code=0
  for name in "${!port_of[@]}"; do
    is_running "$name" && continue
    wait "${pid_of[$name]}" || code=$?
    echo "Error: $name exited with code $code $1: $(last_error "$logs/$name.log"); see $logs/$name.log" >&2
    return 1
  done
}

for ((i = 0; i < servers; i++)); do
  # shellcheck disable=SC2086
  serve "policy-$i" "$i" "$policy" ${POLICY_FLAGS:-}
done
if [ "$judges" = 1 ]; then
  # shellcheck disable=SC2086
  serve judge "$servers" "${JUDGE:-Qwen/Qwen3-4B-Instruct-2507}" "${judge_flags[@]}" ${JUDGE_FLAGS:-}
fi
for name in "${!port_of[@]}"; do
  until is_listening "${port_of[$name]}"; do
    note_leftovers "$name"
    check_servers "during startup"
    check_signals
  done
done
note_leftovers "${!port_of[@]}"

export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.36}
check_signals
start doctor python -m poly_epo_jax.doctor --short "${flags[@]}"
while is_running doctor; do
  check_signals
  check_servers "while the doctor was running"
done
wait "${pid_of[doctor]}" || exit 1
check_signals
start trainer python -m poly_epo_jax.main "${flags[@]}"
failed=0
while is_running trainer; do
  sleep 0.5 || true
  if ((handled == 0 && signals > 0)); then
    handled=$signals
    echo "The trainer completes its update and saves; a second Ctrl-C or SIGTERM discards the step." >&2
    kill -TERM "${pid_of[trainer]}" || true
  elif ((handled == 0)) && ! check_servers "while the trainer was running"; then
    failed=1 handled=1
    kill -TERM "${pid_of[trainer]}" || true
    break
  elif ((signals > handled)); then
    failed=$code handled=$signals
    break
  fi
done
# Without servers, the trainer cannot complete the step, and saves the previous steps.
[ "$failed" = 0 ] || stop 5 "${!port_of[@]}"
code=0
wait "${pid_of[trainer]}" || code=$?
[ "$failed" = 0 ] || exit "$failed"
exit "$code"
