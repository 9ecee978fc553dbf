#!/bin/sh
# nbd-kernel.sh - runs in the kernel lab (see run-nbd.sh): tests the kernel's NBD driver on exports of the program with file systems and
# verifying clients, and takes disks away under load in every way, after which no process may hang. Ends at the first failure.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run
for module in crc32c_generic crc32_generic ext4 xfs; do modprobe $module 2>/dev/null || true; done
modprobe nbd nbds_max=2 max_part=0
mkdir -p /tmp/lab/mnt; cd /tmp/lab
disk=/dev/nbd0 socket=/run/nbd.sock
wrong() { echo "FAIL $1"; cat err; dmesg | tail -n 40; exit 1; }
soon() { for _ in $(seq 600); do "$@" && return; sleep 0.1; done; wrong "not in time: $*"; }
ended() { ! kill -0 $1 2>/dev/null || grep -q '^State:.Z' /proc/$1/status; }
no_stuck() { ! grep -q '^State:.D' /proc/[0-9]*/task/[0-9]*/status 2>/dev/null; }
detached() { [ ! -e /sys/block/nbd0/pid ]; }
. /lab/disk-use.sh

: >err
serve() {
  freestone serve "$@" --nbd unix:$socket >out 2>>err & server=$!
  freestone wait --timeout 2m || wrong "no server"; }
attach() { # export connections
  nbd-client -unix $socket $disk -N $1 -b 4096 -C $2 -timeout 30 >said 2>&1 || wrong "nbd-client: $(cat said)"
  soon test -e /sys/block/nbd0/pid; }
detach() { nbd-client -d $disk >said 2>&1 || wrong "nbd-client -d: $(cat said)"; soon detached; }
# Writes continuously until a write fails.
load() { (while dd if=/dev/zero of=$1 bs=64k count=256 oflag=direct status=none 2>/dev/null; do :; done) & client=$!; }
# The load must end with an error. The driver keeps a disk without a server until `nbd-client -d`.
gone() { soon ended $client; nbd-client -d $disk >said 2>&1 || true; soon detached; soon no_stuck; }

serve r=ram,disksize=320M
attach r 2
[ "$(blockdev --getsize64 $disk)" = $((320 << 20)) ] || wrong "size $(blockdev --getsize64 $disk)"
[ "$(cat /sys/block/nbd0/queue/discard_max_bytes)" != 0 ] || wrong "the disk does not support discard"
for kind in ext4 xfs; do file_system $kind $disk mnt 64; done
verified $disk 96

# A trim frees memory.
held() { freestone stat r --json | grep -o '"orig_data_size": *[0-9]*' | grep -o '[0-9]*$'; }
mkfs.ext4 -q -F $disk >said 2>&1; mount -t ext4 $disk mnt
dd if=/dev/urandom of=mnt/file bs=1M count=64 conv=fsync status=none
[ "$(held)" -gt $((64 << 20)) ] || wrong "the disk holds $(held) bytes of a file of 64 MiB"
rm mnt/file; sync; fstrim mnt
[ "$(held)" -lt $((32 << 20)) ] || wrong "the disk holds $(held) bytes after a trim"
umount mnt; blkdiscard -f $disk
[ "$(held)" = 0 ] || wrong "the disk holds $(held) bytes after a discard of the whole disk"
echo "ok   discards"
detach

# The client disconnects under load.
for connections in 1 4; do
  attach r $connections; load $disk; sleep 2
  nbd-client -d $disk >said 2>&1 || wrong "nbd-client -d: $(cat said)"
  gone
  attach r 1; dd if=$disk of=/dev/null bs=1M count=4 iflag=direct status=none || wrong "the disk cannot be read after a reconnect"; detach
  echo "ok   disconnected under load, $connections connections"; done

# The server unpublishes the disk, also under a file system.
attach r 2; load $disk; sleep 2
freestone unpublish r --force >/dev/null; gone
freestone publish r --nbd unix:$socket >/dev/null
attach r 1; mkfs.ext4 -q -F $disk >said 2>&1 || wrong "mkfs: $(cat said)"; mount -t ext4 $disk mnt
(while dd if=/dev/zero of=mnt/load bs=64k count=256 conv=fsync status=none 2>/dev/null; do :; done) & client=$!
sleep 2; freestone unpublish r --force >/dev/null; soon ended $client
umount mnt || wrong "umount of an unpublished disk"
gone
freestone publish r --nbd unix:$socket >/dev/null
attach r 1; mount -t ext4 $disk mnt || wrong "flushed data is lost"; umount mnt; detach
echo "ok   unpublished under load"

# The server is killed.
attach r 2; load $disk; sleep 2
kill -9 $server; wait $server 2>/dev/null || true; server=
gone
rm -f $socket
echo "ok   server killed under load"

serve r=ram,disksize=64M
attach r 1; verified $disk 48; detach
kill -TERM $server; wait $server || wrong "the server ends with $?"
mounts nbd
dmesg | grep -i 'hung task\|blocked for more\|BUG:\|general protection' && wrong "the kernel's log" || true
