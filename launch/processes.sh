# Sourced by node.sh. Manages processes by name, and stops each of them together with its descendants.
declare -A pid_of=()
start() { # NAME COMMAND...: starts a process in a separate session with its descendants, which Ctrl-C does not reach
  local name=$1
  shift
  setsid "$@" </dev/null &
  pid_of[$name]=$!
}

is_running() { kill -0 "${pid_of[$1]}" 2>/dev/null; }

processes() { # NAME...: prints the ids of their processes (-p covers processes that have not created their session yet)
  local name ids=
  for name in "$@"; do ids+=,${pid_of[$name]}; done
  [ -z "$ids" ] || ps -o stat=,pid= -p "${ids:1}" -s "${ids:1}" | awk '$1 !~ /^Z/ { print $2 }'
}

stop() { # SECONDS NAME...: sends SIGTERM, and SIGKILL after the timeout; signals are ignored afterwards
  set +e
  trap '' INT TERM HUP
  local seconds=$1 left running name i
  shift
  note_leftovers "$@"
  for ((i = 0; i < 2 * seconds + 30; i++)); do
    mapfile -t left < <(processes "$@")
    [ ${#left[@]} -gt 0 ] || return
    running=()
    for name in "$@"; do ! is_running "$name" || running+=("${pid_of[$name]}"); done
    if ((i >= 2 * seconds)); then
      kill -KILL "${left[@]}"
    elif [ ${#running[@]} -gt 0 ]; then # each of these first stops its own processes
      kill -TERM "${running[@]}"
    else
      kill -TERM "${left[@]}"
    fi 2>/dev/null
    sleep 0.5
  done
  echo "Error: processes ${left[*]} do not terminate; inspect them with ps." >&2
}

# Servers leave files in /dev/shm whose names do not identify their process, so the inodes that they map are recorded.
declare -A leftovers=()
note_leftovers() { # NAME...
  local pid inode
  for pid in $(processes "$@"); do
    while read -r inode; do leftovers[$inode]=1; done < <(
      awk '$6 ~ "^/dev/shm/(sem[.]|sglang_loads_|psm_)" { print $5 }' "/proc/$pid/maps" 2>/dev/null
    )
  done
}
remove_leftovers() {
  local inode
  for inode in "${!leftovers[@]}"; do
    find /dev/shm -maxdepth 1 '(' -name 'sem.mp-*' -o -name 'sglang_loads_*' -o -name 'psm_*' ')' -inum "$inode" -delete
  done
}
