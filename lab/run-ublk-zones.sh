#!/bin/bash
# run-ublk-zones.sh [drive|files|kernel..]... - tests zoned block devices of the program with the ublk driver of stock kernels (default: 6.12
# and 7): reports, operations, limits and verifying clients (drive), and file systems (files); see ublk-zones.sh. FREESTONE names the
# program; by default it is built.
set -eu
cd "$(dirname "$0")/.."
parts= kernels=
for word in "$@"; do case $word in drive|files) parts="$parts $word";; *) kernels="$kernels $word";; esac; done
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
lab/zonefs_super.py "$dir/zonefs"
[ -n "${FREESTONE:-}" ] || cargo build --quiet --package freestone-cli
strip -o "$dir/freestone" "${FREESTONE:-${CARGO_TARGET_DIR:-target}/debug/freestone}"
for kernel in ${kernels:-6.12 7}; do
  # Modules that file systems need before Linux 7.
  modules="ublk_drv f2fs btrfs zonefs"; [ "$kernel" = 7 ] || modules="$modules crc32_generic crc32c_generic"
  for part in ${parts:-drive files}; do
    echo "== $kernel, $part"
    lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules" -t 600 -M 1500M \
      -b "dd cmp md5sum diff fio blkzone blockdev mkfs.f2fs fsck.f2fs mkfs.btrfs btrfs $dir/freestone" -i "$dir/zonefs:/zonefs" lab/ublk-zones.sh "$part"
  done
done
