# Sourced by the other scripts: makes .venv in the repository, or reuses it, with the extras named in $1 (e.g. "[test]").
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
  echo "Error: $python is $("$python" --version 2>&1), but Python 3.11 to 3.13 is needed; name one with PYTHON=..." >&2
  exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
# Installing again is only needed when setup.py has changed since, or when other extras are asked for.
stamp=.venv/installed-$(cat setup.py - <<<"$1" | cksum | tr -d ' ')
if [ ! -e "$stamp" ]; then
  echo "Installing into .venv (a minute or two) ..."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".$1"
  touch "$stamp"
fi
source .venv/bin/activate
