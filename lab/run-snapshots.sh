#!/bin/bash
# run-snapshots.sh [part..] - tests the kernel's dm-snapshot and Freestone's snapshots on the same devices in a stock kernel: each loads and
# finishes what the other wrote or began. COW_LAB names the program that drives Freestone; by default it is built. See snapshots.sh.
set -eu
cd "$(dirname "$0")/.."
disks=$(mktemp -d); trap 'rm -rf "$disks"' EXIT
truncate -s 96M "$disks/disk"
if [ -z "${COW_LAB:-}" ]; then
  cargo build --quiet --package freestone --example cow_lab
  COW_LAB=${CARGO_TARGET_DIR:-target}/debug/examples/cow_lab
fi
strip -o "$disks/cow_lab" "$COW_LAB"
lab/kernel-lab.sh -k 7 -m 'dm_snapshot dm_delay virtio_blk' -b "dd dmsetup cmp diff $disks/cow_lab" -D "$disks/disk" -t 1200 lab/snapshots.sh "$@"
