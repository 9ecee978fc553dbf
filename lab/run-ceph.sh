#!/bin/bash
# run-ceph.sh [calls|images|rbd|speed]... - runs tests on a real Ceph of one node (see ceph.sh): all calls of object stores, racing
# conditional writes, and the OSD and the gateway killed under writes and reads (calls); images (see ceph-images.sh); and disks in RBD (see
# ceph-rbd.sh). Runs all parts but `speed` by default. Needs root only to install missing packages. CEPH_LAB and FREESTONE name the programs;
# by default they are built. CEPH_DIR (default: /var/tmp) needs a few GB of space.
set -eu
cd "$(dirname "$0")/.."
parts=" ${*:-calls images rbd} "
dir=$(mktemp -d "${CEPH_DIR:-/var/tmp}/ceph.XXXXXX")
end() { lab/ceph.sh stop "$dir" || true; rm -rf "$dir"; }
trap end EXIT
if [ -z "${CEPH_LAB:-}" ]; then
  cargo build --quiet --package freestone-objects --example ceph_lab
  CEPH_LAB=${CARGO_TARGET_DIR:-target}/debug/examples/ceph_lab
fi
if [ -z "${FREESTONE:-}" ]; then cargo build --quiet --package freestone-cli --features full; fi
FREESTONE=$(realpath "${FREESTONE:-${CARGO_TARGET_DIR:-target}/debug/freestone}")
export FREESTONE
# Removes AWS settings of the caller; ceph.sh prints the ones to use.
for name in ${!AWS_@}; do unset "$name"; done
# A separate assignment, because a failure in the arguments of eval would be ignored.
said=$(lab/ceph.sh start "$dir")
eval "$said"

killed() { # daemon, seconds that it is away, seconds of load
  echo "     $1 is killed"
  "$CEPH_LAB" load "$3" & load=$!
  sleep 2
  lab/ceph.sh kill "$1" "$dir"
  "$CEPH_LAB" stalled
  sleep "$2"
  lab/ceph.sh again "$1" "$dir"
  wait $load; }
calls() {
  "$CEPH_LAB" calls
  "$CEPH_LAB" race 40
  killed osd 5 30
  killed rgw 3 15
  echo "     stop and restart of the cluster"
  lab/ceph.sh stop "$dir"
  lab/ceph.sh start "$dir" >/dev/null
  "$CEPH_LAB" race 10
  "$CEPH_LAB" load 3; }

case $parts in *' calls '*) calls;; esac
case $parts in *' images '*) lab/ceph-images.sh "$dir";; esac
case $parts in *' rbd '*) lab/ceph-rbd.sh "$dir";; esac
case $parts in *' speed '*) lab/ceph-rbd-speed.sh "$dir";; esac
