# Sourced by the other scripts: makes or reuses .venv in the repository, with the extras named in $1 (e.g. "[test]"), in
# exactly the versions of launch/lock.txt.
#
#   PYTHON=...     the interpreter; else the first of python3, python3.13, python3.12 and python3.11 that will do
#   LOCK=newest    the newest versions that setup.py allows, instead of the lock's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environments.sh

if ! is_whole .venv || ! will_do .venv/bin/python; then
  find_python
  make_env .venv "$python"
elif [ -n "${PYTHON:-}" ]; then
  found=$("$PYTHON" --version 2>/dev/null) || found=missing
  has=$(.venv/bin/python --version)
  [ "$found" = "$has" ] || fail "PYTHON=$PYTHON is $found, but .venv has $has; remove .venv first."
fi
# Installing again is only needed if the requested packages have changed since the last time.
versions=.venv/installed-$(cat setup.py launch/lock.txt - <<<"${LOCK:-}" | cksum | tr -d ' ')
if [ ! -e "$versions$1" ]; then
  case ${LOCK:-} in
    "") options=(--constraint launch/lock.txt) ;;
    newest) options=(--upgrade) ;;
    *) fail "LOCK=$LOCK is unknown; leave it out for the versions of launch/lock.txt, or say LOCK=newest." ;;
  esac
  echo "Installing into .venv (a minute or two) ..."
  touch .venv/unfinished
  install .venv "${options[@]}" --editable ".$1"
  # Extras can be added one by one, as long as all have the same versions.
  find .venv -maxdepth 1 -name 'installed-*' ! -name "$(basename "$versions")*" -delete
  touch "$versions$1"
fi
rm -f .venv/unfinished
source .venv/bin/activate
