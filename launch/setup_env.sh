# Sourced by the other scripts: makes .venv in the repository, or reuses it, with the extras named in $1 (e.g. "[test]"),
# in exactly the versions of launch/lock.txt, by uv where there is one, else by pip.
#
#   PYTHON=...     the interpreter; else the first of python3, python3.13, python3.12 and python3.11 that will do
#   LOCK=newest    the newest versions that setup.py allows, in place of the lock's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "Error: $1" >&2
  exit 1
}

will_do() { # PYTHON
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
}

install() { # REQUIREMENTS AND OPTIONS: into .venv
  local log=.venv/install.log tool=(.venv/bin/python -m pip install --disable-pip-version-check)
  if command -v uv >/dev/null; then tool=(uv pip install --python .venv/bin/python); fi
  "${tool[@]}" "$@" >"$log" 2>&1 && return
  if grep -qiE 'no space left|disk quota' "$log"; then
    fail "the disk is full; a CPU's packages take 1.5 GB, a GPU's 7 GB. Make room, then run this again."
  elif grep -qiE 'name resolution|name or service|dns error|failed to (connect|fetch)|connection (refused|reset|timed out)' "$log"; then
    rm -f .venv/unfinished # nothing has been changed
    fail "the package index cannot be reached; connect to a network, or name a mirror by PIP_INDEX_URL (UV_INDEX_URL for \
uv), then run this again."
  fi
  fail "installing failed: $(grep -iE 'error' "$log" | tail -n 1); all of it is in $log."
}

make_venv() {
  local python candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if will_do "$candidate"; then python=$candidate && break; fi
  done
  [ -n "${python:-}" ] ||
    fail "Python 3.11, 3.12 or 3.13 is needed, and ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 | head -n 1); \
install one, or name one with PYTHON=..."
  rm -rf .venv
  mkdir .venv && touch .venv/unfinished
  if command -v uv >/dev/null; then
    uv venv --quiet --allow-existing --seed --python "$python" .venv
  else
    "$python" -m venv .venv >.venv/install.log 2>&1
  fi || fail "$python cannot make a virtual environment: $(tail -n 1 .venv/install.log 2>/dev/null) On Debian and Ubuntu, \
'apt install python3-venv' brings what is missing; then run this again."
}

# .venv/unfinished is there while .venv is being changed. What a broken-off call leaves is not trusted, but made anew.
if [ -e .venv/unfinished ] || ! will_do .venv/bin/python || ! { [ -x .venv/bin/pip ] || command -v uv >/dev/null; }; then
  make_venv
elif [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" --version)" != "$(.venv/bin/python --version)" ]; then
  fail "PYTHON=$PYTHON is $("$PYTHON" --version), but .venv has $(.venv/bin/python --version); remove .venv first."
fi
# Installing again is only needed when what is asked for has changed since.
versions=.venv/installed-$(cat setup.py launch/lock.txt - <<<"${LOCK:-}" | cksum | tr -d ' ')
if [ ! -e "$versions$1" ]; then
  case ${LOCK:-} in
    "") options=(--constraint launch/lock.txt) ;;
    newest) options=(--upgrade) ;;
    *) fail "LOCK=$LOCK is unknown; leave it out for the versions of launch/lock.txt, or say LOCK=newest." ;;
  esac
  echo "Installing into .venv (a minute or two) ..."
  touch .venv/unfinished
  install "${options[@]}" --editable ".$1"
  # Extras can be added one by one, as long as all are of the same versions.
  find .venv -maxdepth 1 -name 'installed-*' ! -name "$(basename "$versions")*" -delete
  touch "$versions$1"
fi
rm -f .venv/unfinished
source .venv/bin/activate
