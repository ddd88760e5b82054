#!/usr/bin/env bash
# Replaces the owner in the address of the repository in all tracked files.
#
#   bash launch/address.sh OWNER        for example: bash launch/address.sh octocat
source "$(dirname "$0")/help.sh"
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ${1:-} =~ ^[A-Za-z0-9][A-Za-z0-9-]*$ ]] || { echo "Error: append the name of a GitHub account." >&2; exit 2; }
owner='github\.com/[A-Za-z0-9-]+/poly_epo_jax'
git grep -lIzE "$owner" | xargs -0 sed -i -E "s#$owner#github.com/$1/poly_epo_jax#g"
