#!/bin/sh
# ublk-use.sh - runs in the kernel lab (see run-ublk.sh): file systems and verifying clients on block devices of the program, which grow
# and are removed while in use. Ends at the first failure.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run
for module in ublk_drv crc32c_generic crc32_generic ext4 xfs btrfs f2fs; do modprobe $module 2>/dev/null || true; done
mkdir -p /tmp/lab/mnt; cd /tmp/lab
wrong() { echo "FAIL $1"; cat err; dmesg | tail -n 40; exit 1; }
soon() { for _ in $(seq 300); do "$@" && return; sleep 0.1; done; wrong "not in time: $*"; }
absent() { [ ! -e "$1" ]; }
ended() { ! kill -0 $1 2>/dev/null || grep -q '^State:.Z' /proc/$1/status; }
no_stuck() { ! grep -q '^State:.D' /proc/[0-9]*/task/[0-9]*/status 2>/dev/null; }
. /lab/disk-use.sh

freestone serve r=ram,disksize=320M,publish=no >out 2>err & server=$!; freestone wait --timeout 2m || wrong "no server"
disk=$(freestone publish r --ublk --queues 2)
for kind in ext4 xfs btrfs f2fs; do file_system $kind $disk mnt 64; done
verified $disk 96 --iodepth_batch_submit=4

# The disk grows while a client writes.
freestone reset r --force >/dev/null
verified $disk 96 >grown & client=$!
sleep 3; freestone set r disksize=512M >/dev/null
wait $client || wrong "$(cat grown)"; cat grown
case $(uname -r) in 6.12*) wanted=655360;; *) wanted=1048576;; esac
[ "$(blockdev --getsz $disk)" = $wanted ] || wrong "size $(blockdev --getsz $disk) after it has grown"
echo "ok   meanwhile the disk has grown to $wanted sectors"

# The disk is removed while it is mounted and a client writes.
for kind in ext4 xfs; do
  mkfs_of $kind $disk >said 2>&1; mount -t $kind $disk mnt
  (while dd if=/dev/zero of=mnt/load bs=64k count=256 conv=fsync status=none 2>/dev/null; do :; done) & client=$!
  sleep 2; freestone unpublish r --force >/dev/null
  soon ended $client; umount mnt || wrong "$kind: umount of a removed disk"; soon absent $disk; soon no_stuck
  disk=$(freestone publish r --ublk --queues 2)
  echo "ok   $kind: removed under load, and no process hangs"; done
mount -t xfs $disk mnt || wrong "xfs: flushed data is lost"; umount mnt
kill -TERM $server; wait $server || wrong "the server ends with $?"
mounts ublk
dmesg | grep -i 'hung task\|blocked for more\|BUG:\|general protection' && wrong "the kernel's log" || true
