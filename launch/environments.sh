# Sourced: makes Python environments and installs into them, with uv if there is one, else with pip. A failure is
# reported in one sentence, and the next call recovers.
#
# ENV/unfinished exists while an environment is being changed. An environment left by an interrupted call is not
# trusted, but made anew.

fail() { # SENTENCE
  echo "Error: $1" >&2
  exit 1
}

will_do() { # PYTHON
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
}

# Sets `python`: PYTHON, or else the first of python3, python3.13, python3.12 and python3.11 that will do.
find_python() {
  local candidate found
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if will_do "$candidate"; then python=$candidate && return; fi
  done
  found=$("${PYTHON:-python3}" --version 2>/dev/null) || found=missing
  fail "Python 3.11, 3.12 or 3.13 is needed, and ${PYTHON:-python3} is $found; install one, or name one with PYTHON=..."
}

is_whole() { # ENV
  [ -x "$1/bin/python" ] && [ ! -e "$1/unfinished" ] && { [ -x "$1/bin/pip" ] || command -v uv >/dev/null; }
}

make_env() { # ENV PYTHON: replaces what is there
  local said tool=("$2" -m venv)
  if command -v uv >/dev/null; then tool=(uv venv --quiet --allow-existing --seed --python "$2"); fi
  rm -rf "$1"
  mkdir "$1" && touch "$1/unfinished"
  said=$("${tool[@]}" "$1" 2>&1) && return
  refuse_full_disk "$said"
  refuse_no_index "$said" # uv fetches pip
  fail "$2 cannot make a virtual environment: $(grep -vE '^(hint.*)?$' <<<"$said" | tail -n 1) On Debian and Ubuntu, \
'apt install python3-venv' brings what is missing; then run this again."
}

install() { # ENV REQUIREMENTS AND OPTIONS
  local said env=$1 log=$1/install.log tool=("$1/bin/python" -m pip install --disable-pip-version-check)
  # Imports compile what they need; only where they must not write bytecode, all packages are compiled in advance.
  if command -v uv >/dev/null; then
    tool=(uv pip install --python "$1/bin/python" ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode})
  fi
  shift
  said=$("${tool[@]}" "$@" 2>&1) && return
  refuse_full_disk "$said"
  if no_index "$said"; then
    rm -f "$env/unfinished" # nothing has been changed yet
    refuse_no_index "$said"
  fi
  printf '%s\n' "$said" >"$log"
  fail "installing into $env failed: $(grep -iE 'error' <<<"$said" | tail -n 1); all of it is in $log."
}

refuse_full_disk() { # OUTPUT
  ! grep -qiE 'no space left|disk quota' <<<"$1" ||
    fail "the disk is full; packages take 1.5 GB for a CPU and up to 7 GB for a GPU. Make room, then run this again."
}

no_index() { # OUTPUT: says that the package index cannot be reached
  grep -qiE 'name resolution|name or service|dns error|failed to (connect|fetch)|connection (refused|reset|timed out)|certificate' \
    <<<"$1"
}

refuse_no_index() { # OUTPUT
  no_index "$1" || return 0
  ! grep -qi certificate <<<"$1" ||
    fail "the package index's certificate is not trusted; name your network's authority by SSL_CERT_FILE=... (PIP_CERT=... \
for pip), then run this again."
  fail "the package index cannot be reached; connect to a network, or name a mirror by PIP_INDEX_URL (UV_INDEX_URL for \
uv), then run this again."
}
