#!/usr/bin/env bash
# Renews launch/lock.txt: the newest version of everything that setup.py's bounds allow, for Linux, Python 3.11 to 3.13
# and all extras together. Run the tests, then commit it.
#
#   bash launch/lock.sh            the newest versions, into launch/lock.txt
#   bash launch/lock.sh lowest     the lowest that setup.py allows, to the terminal, for a trial of its lower bounds
#
# What setup.py's upper bounds hold back is told by: pip list --outdated
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-newest} in
  newest) options=(--upgrade --output-file launch/lock.txt) ;;
  lowest) options=(--resolution lowest-direct) ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
uv=$(command -v uv) || {
  # Only uv resolves for all Python versions at once; it is removed afterwards.
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --target "$folder" uv
  uv=$folder/bin/uv
}
"$uv" pip compile setup.py --all-extras --universal --python-version 3.11 --no-annotate --quiet "${options[@]}" \
  --custom-compile-command "bash launch/lock.sh"
