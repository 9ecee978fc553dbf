#!/bin/bash
# run-ceph.sh - stores of objects against a real Ceph of one node (see ceph.sh): all calls, conditions under a race, the OSD and the gateway
# killed under writes and reads. It needs no root where Debian's packages are there. CEPH_LAB names the program; without it, it is built.
set -eu
cd "$(dirname "$0")/.."
dir=$(mktemp -d /var/tmp/ceph.XXXXXX)
end() { lab/ceph.sh stop "$dir" || true; rm -rf "$dir"; }
trap end EXIT
if [ -z "${CEPH_LAB:-}" ]; then
  cargo build --quiet --package freestone-objects --example ceph_lab
  CEPH_LAB=${CARGO_TARGET_DIR:-target}/debug/examples/ceph_lab
fi
# Only what ceph.sh says counts.
for name in ${!AWS_@}; do unset "$name"; done
eval "$(lab/ceph.sh start "$dir")"
"$CEPH_LAB" calls
"$CEPH_LAB" race 40

killed() { # daemon, seconds that it is away, seconds of load
  echo "     $1 is killed"
  "$CEPH_LAB" load "$3" & load=$!
  sleep 2
  lab/ceph.sh kill "$1" "$dir"
  "$CEPH_LAB" stalled
  sleep "$2"
  lab/ceph.sh again "$1" "$dir"
  wait $load; }
killed osd 5 30
killed rgw 3 15

echo "     all is stopped and started again"
lab/ceph.sh stop "$dir"
lab/ceph.sh start "$dir" >/dev/null
"$CEPH_LAB" race 10
"$CEPH_LAB" load 3
