#!/usr/bin/env bash
# Everything that a run with servers needs, on one node: policy servers, the judge and the trainer. Made for 4 x H200.
#
#   bash launch/node.sh                                                     the paper's run; repeated, it resumes
#   bash launch/node.sh --config=configs/polaris.py:grpo --config.seed=1    or any other, with any other keys
#
#   GPU            0               1               2               3
#   policy server  :30000          :30001          :30002          -
#   judge          -               -               -               :30010
#   trainer        mesh.fsdp=4, a quarter of every weight on each
#
# Training on-policy is generating and training in turn, so the two share GPUs without being in each other's way. Of an
# H200's 141 GB,
#   - the trainer takes 0.36, 51 GB. Weights, gradients and Adam's two moments of Qwen3-4B in float32 are 4.02e9 x 16
#     bytes = 64 GB, 16 GB on each of four; what the 16,384 tokens of a device's microbatch keep with full remat 3 GB; the
#     head, its gradient and a chunk of logits 6 GB. So bench --plan counts 25 GB; the rest is room for more rows.
#   - a policy server takes 0.50, 70 GB: 8 GB of weights in bfloat16 and 62 GB of KV cache at 147 KB a token, 420,000
#     tokens: all of its 341 responses at once while their mean is below 1,200 tokens, 82 of the longest. CUDA graphs and
#     activations come on top, some 6 GB. What does not fit waits in the server.
#   - the judge takes as much: a call with 8 responses of 4,096 tokens is 35,000 tokens of cache, 5 GB; a dozen fit.
# mem-fraction-static counts what is free when the server starts, so the servers start before the trainer.
# Weights travel through /dev/shm: 8 GB a version, two for a moment.
#
# Settings, as environment variables:
#   POLICY, JUDGE        models; default: the paper's
#   SERVERS              policy servers, on GPUs 0 to SERVERS - 1; default 3
#   PORT                 of the first policy server; the judge's is 10 more
#   POLICY_FLAGS         more flags for sglang.launch_server; --enable-deterministic-inference makes it heed the seeds of
#                        generations, at the price of speed
#   JUDGE_FLAGS          the same for the judge
#   LOGS                 folder of the servers' logs; default runs/logs
#   DEVICE=cpu           for a trial without GPUs
source "$(dirname "$0")/setup_env.sh" "$([ "${DEVICE:-gpu}" = gpu ] && echo '[gpu]' || true)"

device=${DEVICE:-gpu} servers=${SERVERS:-3} port=${PORT:-30000}
logs=${LOGS:-runs/logs}
bash third_party/sglang/setup.sh "$device"
mkdir -p "$logs"

started=()
stop() {
  for pid in "${started[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for pid in "${started[@]}"; do wait "$pid" 2>/dev/null || true; done
}
trap stop EXIT

serve() { # GPU MODEL PORT LOG FLAGS...: in a process group of its own, so that all of it can be stopped
  local gpu=$1 model=$2 port=$3 log=$logs/$4.log
  shift 4
  local flags=()
  if [ "$device" = gpu ]; then flags=(--base-gpu-id "$gpu" --mem-fraction-static 0.50); fi
  setsid bash third_party/sglang/serve.sh "$device" "$model" "$port" "${flags[@]}" "$@" >"$log" 2>&1 &
  started+=($!)
  echo "$4: $model on port $port, log in $log"
}

urls=()
for ((i = 0; i < servers; i++)); do
  urls+=("http://127.0.0.1:$((port + i))")
  # shellcheck disable=SC2086
  serve "$i" "${POLICY:-Qwen/Qwen3-4B-Base}" $((port + i)) "policy-$i" ${POLICY_FLAGS:-}
done
# shellcheck disable=SC2086
serve "$servers" "${JUDGE:-Qwen/Qwen3-4B-Instruct-2507}" $((port + 10)) judge \
  --constrained-json-disable-any-whitespace ${JUDGE_FLAGS:-}

# The trainer waits until they answer. It is told of a SIGTERM, saves after its step, and is waited for.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.36}
[[ " $* " == *" --config="* ]] || set -- --config=configs/polaris.py "$@"
flags=()
for flag in "$@"; do
  flags+=("$flag")
  # Right after the file, so that flags of yours come later, and count.
  if [[ $flag == --config=* ]]; then
    flags+=("--config.rollouts.urls=$(IFS=,; echo "${urls[*]}")" "--config.judge.url=http://127.0.0.1:$((port + 10))")
  fi
done
python -m poly_epo_jax.main "${flags[@]}" &
trainer=$!
trap 'kill -TERM $trainer' TERM INT
code=0
wait "$trainer" || code=$?
# A signal ends the first wait before the trainer has ended.
while kill -0 "$trainer" 2>/dev/null; do wait "$trainer" && code=0 || code=$?; done
exit "$code"
