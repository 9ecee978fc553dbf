#!/bin/bash
# run-writeback.sh [kernel|first] - compares writeback of the kernel's zram and of Freestone in a stock kernel: results and statistics of the
# same sequences, number by number. `kernel` shows the kernel's results only; `first` runs only the first sequence, that of zram's own
# test. FREESTONE names the program; by default it is built. See writeback.sh.
set -eu
cd "$(dirname "$0")/.."
disks=$(mktemp -d); trap 'rm -rf "$disks"' EXIT
truncate -s 64M "$disks/big"; truncate -s 1M "$disks/small"
bins='dd blkdiscard nbd-client socat'
if [ "${1:-}" != kernel ]; then
  if [ -z "${FREESTONE:-}" ]; then
    cargo build --quiet --package freestone-cli
    FREESTONE=${CARGO_TARGET_DIR:-target}/debug/freestone
  fi
  strip -o "$disks/freestone" "$FREESTONE"
  bins="$bins $disks/freestone"
fi
lab/kernel-lab.sh -k 7 -m 'zram nbd' -b "$bins" -D "$disks/big" -D "$disks/small" -t 600 lab/writeback.sh "$@"
