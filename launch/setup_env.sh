# Sourced by other scripts and by users. Creates or reuses .venv in the repository, with the extras in $1 (e.g.
# "[train]") and the exact versions in launch/lock.txt, and activates it.
#
#   PYTHON=...     interpreter; default: the first supported one of python3, python3.13, python3.12 and python3.11
#   LOCK=newest    newest versions that pyproject.toml allows, instead of launch/lock.txt
case $- in
  *i*) # A user's shell, also zsh: its options, folder and functions do not change, and an error does not end it.
    bash "${BASH_SOURCE[0]:-$0}" "$@" && source "$(dirname "${BASH_SOURCE[0]:-$0}")/../.venv/bin/activate"
    return
    ;;
esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environments.sh

if [ -w . ]; then lock_installation .venv.lock; fi
if ! is_complete .venv || ! is_supported .venv/bin/python; then
  find_python
  make_env .venv "$python"
elif [ -n "${PYTHON:-}" ]; then
  found=$("$PYTHON" --version 2>/dev/null) || found=missing
  has=$(.venv/bin/python --version)
  [ "$found" = "$has" ] || fail "PYTHON=$PYTHON is $found, but .venv has $has; delete .venv first."
fi
# Packages are only installed if the requested packages have changed since the last call.
versions=.venv/installed-$(cat pyproject.toml setup.py launch/lock.txt - <<<"${LOCK:-}" | cksum | tr -d ' ')
if [ ! -e "$versions${1:-}" ]; then
  case ${LOCK:-} in
    "") options=(--constraint launch/lock.txt) ;;
    newest) options=(--upgrade) ;;
    *) fail "LOCK=$LOCK is unknown; unset it to use the versions in launch/lock.txt, or set LOCK=newest." ;;
  esac
  echo "Installing into .venv (a minute or two) ..."
  touch .venv/unfinished
  install .venv "${options[@]}" --editable ".${1:-}"
  # Extras are installed incrementally while their versions are the same.
  find .venv -maxdepth 1 -name 'installed-*' ! -name "$(basename "$versions")*" -delete
  touch "$versions${1:-}"
fi
rm -f .venv/unfinished
exec 9>&-
source .venv/bin/activate
