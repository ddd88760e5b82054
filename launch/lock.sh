#!/usr/bin/env bash
# Updates launch/lock.txt with the newest versions that pyproject.toml allows, for Linux, Python 3.11 to 3.13, all extras
# and JetStream together. Run the tests before you commit the file.
#
#   bash launch/lock.sh            writes the newest versions to launch/lock.txt
#   bash launch/lock.sh lowest     prints the lowest versions that pyproject.toml allows, to test its lower bounds
#
# To list packages that the upper bounds in pyproject.toml restrict, run: pip list --outdated
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-newest} in
  newest) options=(--upgrade --output-file launch/lock.txt) ;;
  lowest) options=(--resolution lowest-direct) ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
uv=$(command -v uv) || {
  # Only uv resolves versions for all Python versions together. The temporary installation is removed afterwards.
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --target "$folder" uv
  uv=$folder/bin/uv
}
"$uv" pip compile pyproject.toml third_party/jetstream/pyproject.toml --all-extras --universal --python-version 3.11 \
  --no-annotate --quiet "${options[@]}" --custom-compile-command "bash launch/lock.sh"
