#!/bin/bash
# run-writeback.sh [kernel|first] - the kernel's zram writeback and Freestone's, side by side, in a stock kernel: what each answers
# to the same sequences, number by number. `kernel`: only the kernel's answers are shown. `first`: only the first sequence, the one of
# zram's own test. FREESTONE names the program; without it, it is built. See writeback.sh.
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
