# ceph-use.sh - sourced by ceph-images.sh, ceph-rbd.sh and ceph-rbd-speed.sh: runs servers of the program FREESTONE with files in $dir.
say() { echo "     $1"; }
wrong() { echo "$(basename "$0" .sh): $1" >&2; tail -n 15 "$dir"/*/log >&2 2>/dev/null || true; exit 1; }
now() { echo $(($(date +%s%N) / 1000000)); }
soon() { # seconds command...
  until=$(($(now) + $1 * 1000)); shift
  while ! "$@" >/dev/null 2>&1; do [ "$(now)" -lt $until ] || return 1; sleep 0.05; done; }
# Leaves no processes behind.
trap '[ -z "$server" ] || kill -9 "$server" 2>/dev/null || true; for pid in $(jobs -p); do kill -9 "$pid" 2>/dev/null || true; done' EXIT
# Starts a server with an empty cache, the device d and the given devices. Later verbs use this server.
serve() { # words of the device d, devices...
  d=$1; shift
  at=$(mktemp -d "$dir/sXXXX")
  export FREESTONE_CONTROL=$at/ctl
  (cd "$at"; FREESTONE_CACHE=$at/cache exec "$FREESTONE" serve "d=$d" "$@" --nbd unix:nbd --control ctl >log 2>&1) & server=$!
  timeout 60 "$FREESTONE" wait || wrong "no server"; }
end() {
  kill "$server"; wait "$server" || wrong "the server ends with $?"
  server=; rm -rf "$at"; }
uri() { echo "nbd+unix:///$1?socket=$at/nbd"; }
same() { # device file
  timeout 90 nbdcopy "$(uri "$1")" "$dir/read" || wrong "$1 cannot be read"
  cmp "$dir/read" "$2" || wrong "$1 is not $2"; }
