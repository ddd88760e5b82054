# Sourced by other scripts. Creates Python environments and installs packages into them, with uv, which is fetched with
# pip if it is missing, and with pip if this fails. Failures print a one-line error message, and the next call recovers
# from them.
#
# ENV/unfinished exists while an environment is being modified. The environment of an interrupted call is not reused but
# created again.

fail() { # MESSAGE
  echo "Error: $1" >&2
  exit 1
}

is_supported() { # PYTHON
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
}

# Sets `python` to PYTHON, or to the first supported one of python3, python3.13, python3.12 and python3.11.
find_python() {
  local candidate found
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if is_supported "$candidate"; then python=$candidate && return; fi
  done
  found=$("${PYTHON:-python3}" --version 2>/dev/null) || found=missing
  fail "Python 3.11, 3.12 or 3.13 is required, but ${PYTHON:-python3} is $found; install a supported version, or set \
PYTHON=... to its path."
}

is_complete() { # ENV
  [ -x "$1/bin/python" ] && [ ! -e "$1/unfinished" ] && { [ -x "$1/bin/pip" ] || command -v uv >/dev/null; }
}

lock_installation() { # FILE: waits for other processes that hold the lock; `exec 9>&-` releases it
  exec 9>>"$1"
  command -v flock >/dev/null || return 0
  flock --nonblock 9 || { echo "Waiting for another installation ..." && flock 9; }
}

make_env() { # ENV PYTHON: replaces an existing environment
  local output tool=("$2" -m venv)
  if command -v uv >/dev/null; then tool=(uv venv --quiet --allow-existing --seed --python "$2"); fi
  rm -rf "$1"
  mkdir "$1" && touch "$1/unfinished"
  output=$("${tool[@]}" "$1" 2>&1) && return
  fail_if_disk_full "$output"
  fail_if_no_index "$output" # uv downloads pip
  fail "failed to create a virtual environment with $2: $(grep -vE '^(hint.*)?$' <<<"$output" | tail -n 1) On Debian \
and Ubuntu, run 'apt install python3-venv', then run this command again."
}

fetch_uv() { # ENV PIP...: installs uv into ENV with pip, unless it is already there, and prints its path
  local uv=$1/bin/uv
  shift
  [ -x "$uv" ] || "$@" --quiet uv >/dev/null 2>&1 && echo "$uv"
}

install() { # ENV REQUIREMENTS AND OPTIONS
  local output uv env=$1 log=$1/install.log pip=("$1/bin/python" -m pip install --disable-pip-version-check)
  shift
  if uv=$(command -v uv) || uv=$(fetch_uv "$env" "${pip[@]}"); then
    # Modules are compiled on first import. All packages are compiled in advance only if imports must not write bytecode.
    output=$("$uv" pip install --python "$env/bin/python" ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode} "$@" 2>&1) &&
      return
    # The fetched uv does not read all settings of pip, such as its certificates.
    if [ "$uv" -ef "$env/bin/uv" ]; then uv=; fi
  fi
  if [ -z "$uv" ]; then output=$("${pip[@]}" "$@" 2>&1) && return; fi
  fail_if_disk_full "$output"
  if is_index_error "$output"; then
    rm -f "$env/unfinished" # nothing has been changed yet
    fail_if_no_index "$output"
  fi
  printf '%s\n' "$output" >"$log"
  fail "installing into $env failed: $(grep -iE 'error' <<<"$output" | tail -n 1); see $log for the complete output."
}

# Creates or reuses FOLDER/env-DEVICE with the packages in FOLDER/requirements-DEVICE.txt. Servers and the trainer require
# different versions of torch and transformers. The interpreter can be selected with NAME_PYTHON=..., in capitals.
make_server_env() { # NAME FOLDER DEVICE
  local version python found selected=${1^^}_PYTHON env=$2/env-$3 pins=$2/requirements-$3.txt
  case $3 in
    cpu) version=3.11 ;;
    gpu) version=3.12 ;;
    *) echo "Usage: bash third_party/${1,,}/setup.sh gpu|cpu" >&2; exit 2 ;;
  esac
  python=${!selected:-python$version}
  local stamp=$env/installed-$(cksum <"$pins" | tr -d ' ')
  [ ! -e "$stamp" ] || return 0
  found=$("$python" --version 2>/dev/null) || found=missing
  [[ $found == "Python $version."* ]] ||
    fail "$1 for $3 requires Python $version, but $python is $found; install it, or select one with $selected=..."
  lock_installation "$env.lock"
  [ ! -e "$stamp" ] || return 0
  echo "Installing $1 for $3 into $env (a few minutes) ..."
  make_env "$env" "$python"
  # torch on PyPI requires CUDA libraries. The CPU build is in a separate index.
  if [ "$3" = cpu ]; then
    install "$env" --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$(grep ^torch== "$pins")"
  fi
  install "$env" --no-deps --requirement "$pins"
  rm "$env/unfinished"
  touch "$stamp"
}

fail_if_disk_full() { # OUTPUT
  ! grep -qiE 'no space left|disk quota' <<<"$1" ||
    fail "the disk is full; free disk space (packages take 1.5 GB for CPU and up to 7 GB for GPU), then run this \
command again."
}

is_index_error() { # OUTPUT: succeeds if the output reports that the package index cannot be reached
  grep -qiE 'name resolution|name or service|dns error|failed to (connect|fetch)|connection (refused|reset|timed out)|certificate' \
    <<<"$1"
}

fail_if_no_index() { # OUTPUT
  is_index_error "$1" || return 0
  ! grep -qi certificate <<<"$1" ||
    fail "the certificate of the package index is not trusted; set SSL_CERT_FILE=... (PIP_CERT=... for pip) to the \
certificate authority of your network, then run this command again."
  fail "the package index cannot be reached; connect to a network, or set PIP_INDEX_URL (UV_INDEX_URL for uv) to a \
mirror, then run this command again."
}
