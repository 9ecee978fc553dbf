#!/bin/bash
# run-ublk.sh [PART] [KERNEL..] - tests block devices with the ublk driver of stock kernels (default: 6.12 and 7). Parts (default: all):
# every operation on a RAM disk (device, see ublk.sh), block devices of the program (program, see ublk-program.sh), file systems (use, see
# ublk-use.sh), recoverable servers that are killed (recovery, see ublk-recovery.sh), a hundred block devices (many, see ublk-many.sh), an
# unprivileged user (user, see ublk-user.sh), and low memory (memory, see ublk-memory.sh). UBLK_SERVE and FREESTONE name the programs; by
# default they are built.
set -eu
cd "$(dirname "$0")/.."
parts="device program use recovery many user memory"
case ${1:-} in device|program|use|recovery|many|user|memory) parts=$1; shift;; esac
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
built=${CARGO_TARGET_DIR:-target}/debug
case $parts in *device*)
  [ -n "${UBLK_SERVE:-}" ] || cargo build --quiet --package freestone-ublk --example serve
  strip -o "$dir/serve" "${UBLK_SERVE:-$built/examples/serve}"; esac
case $parts in *program*|*use*|*recovery*|*many*|*memory*)
  [ -n "${FREESTONE:-}" ] || cargo build --quiet --package freestone-cli
  strip -o "$dir/freestone" "${FREESTONE:-$built/freestone}"; esac
[ $# -gt 0 ] || set -- 6.12 7
for kernel in "$@"; do
  # Modules that file systems need before Linux 7.
  modules="ublk_drv ext4"; [ "$kernel" = 7 ] || modules="$modules crc32c_generic crc32_generic"
  for part in $parts; do
    echo "== $kernel, $part"
    case $part in
      device) lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules" -t 1200 \
        -b "cmp dd fio mkfs.ext4 e2fsck blkdiscard blockdev $dir/serve" lab/ublk.sh;;
      program) lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules" -t 600 \
        -b "dd md5sum mkfs.ext4 blockdev $dir/freestone" lab/ublk-program.sh;;
      use)
        lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules xfs btrfs f2fs" -t 1200 -i lab/disk-use.sh:/lab/disk-use.sh \
          -b "dd md5sum fio blockdev mkfs.ext4 e2fsck mkfs.xfs xfs_repair mkfs.btrfs btrfs mkfs.f2fs fsck.f2fs $dir/freestone" \
          lab/ublk-use.sh;;
      recovery)
        lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules" -t 1200 \
          -b "dd md5sum fio blockdev mkfs.ext4 e2fsck $dir/freestone" lab/ublk-recovery.sh;;
      many)
        lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules" -t 600 -b "awk dd $dir/freestone" lab/ublk-many.sh;;
      user)
        lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules" -t 600 -i packaging/udev/60-freestone-ublk.rules:/lab/rules \
          -b "cmp dd md5sum setpriv stat mkfs.ext4 blockdev $dir/freestone" lab/ublk-user.sh;;
      memory)
        rm -f "$dir/disk"; truncate -s 2G "$dir/disk"
        lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules" -t 900 -M 256M -D "$dir/disk" \
          -b "awk cmp dd mkfs.ext4 e2fsck $dir/freestone" lab/ublk-memory.sh;;
    esac
  done
done
