#!/bin/sh
# ublk-program.sh - runs in the kernel lab (see run-ublk.sh): block devices of the program. Ends at the first failure.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run
modprobe ublk_drv; modprobe crc32c_generic 2>/dev/null || true; modprobe ext4 2>/dev/null || true
mkdir -p /tmp/lab/mnt; cd /tmp/lab
wrong() { echo "FAIL $1"; cat err out; exit 1; }
soon() { for _ in $(seq 100); do "$@" && return; sleep 0.1; done; wrong "not in time: $*"; }
absent() { [ ! -e "$1" ]; }
begin() { freestone serve "$@" --ublk >out 2>err & server=$!; freestone wait || wrong "no server"; }

begin r=ram,disksize=128M n=null,size=64M,publish=no
disk=$(sed -n 's/^r: \(\/dev\/ublkb.*\)/\1/p' out)
[ -b "$disk" ] || wrong "the server prints no block device"
freestone list | grep -q "$disk" || wrong "list does not show it"
[ "$(blockdev --getsz "$disk")" = 262144 ] || wrong "the size is wrong"
mkfs.ext4 -q "$disk"; mount -t ext4 "$disk" mnt
dd if=/dev/urandom of=mnt/file bs=1M count=40 conv=fsync status=none
sum=$(md5sum <mnt/file)
for verb in unpublish remove; do
  freestone $verb r 2>said && wrong "$verb of a mounted disk succeeds"
  grep -q "a client is connected" said || wrong "$verb: $(cat said)"; done
freestone reset r 2>said && wrong "reset of a mounted disk succeeds"
grep -q "r: $disk is mounted at /tmp/lab/mnt; " said || wrong "reset: $(cat said)"
umount mnt; mount -t ext4 "$disk" mnt; [ "$(md5sum <mnt/file)" = "$sum" ] || wrong "the content differs"; umount mnt
echo "ok   a file system on serve --ublk, and refusals while it is mounted"

other=$(freestone publish n --ublk --queues 2)
[ -b "$other" ] && [ "$(ls /sys/block/${other#/dev/}/mq | wc -l)" = 2 ] || wrong "not two queues: $other"
dd if="$other" of=/dev/null bs=1M iflag=direct status=none
freestone unpublish n; soon absent "$other"
freestone snapshot r golden >/dev/null; freestone fork golden job >/dev/null
job=$(freestone publish job --ublk); mount -t ext4 "$job" mnt; [ "$(md5sum <mnt/file)" = "$sum" ] || wrong "a fork has different content"
rm mnt/file; umount mnt; freestone rewind job
mount -t ext4 "$job" mnt; [ "$(md5sum <mnt/file)" = "$sum" ] || wrong "the rewind has no effect"; umount mnt
# A reader keeps the block device open, so no last close drops the cache. Dirty pages must not be written after a rewind.
freestone rewind job; dd if=/dev/urandom of=new bs=1M count=1 status=none; dd if="$job" of=was bs=1M count=1 iflag=direct status=none
exec 9<"$job"
dd if=new of="$job" bs=1M conv=notrunc status=none; [ "$(md5sum <new)" = "$(dd if="$job" bs=1M count=1 status=none | md5sum)" ] || wrong "the cache"
freestone rewind job || wrong "rewind of an idle block device"
[ "$(md5sum <was)" = "$(dd if="$job" bs=1M count=1 status=none | md5sum)" ] || wrong "the old content is cached"
sync "$job"; [ "$(md5sum <was)" = "$(dd if="$job" bs=1M count=1 iflag=direct status=none | md5sum)" ] || wrong "dirty pages came back"
exec 9<&-
freestone rewind job || wrong "rewind of an idle block device again"
mount -t ext4 "$job" mnt; rm mnt/file; sync mnt
freestone rewind job 2>said && wrong "rewind of a mounted fork succeeds"
grep -q "job: $job is mounted at /tmp/lab/mnt; " said || wrong "rewind: $(cat said)"
freestone rewind job --force || wrong "a forced rewind"
grep -q "job: the content is replaced (--force) although $job is mounted at /tmp/lab/mnt; " err || wrong "no warning"
umount mnt || umount -l mnt; freestone rewind job --force
mount -t ext4 "$job" mnt; [ "$(md5sum <mnt/file)" = "$sum" ] || wrong "the second rewind has no effect"; umount mnt
for id in 1 2 3 4 5 6 7 8; do dd if=/dev/urandom of="$job" bs=1M count=8 conv=notrunc,fsync status=none & freestone rewind job || wrong "rewind under a writer"; wait $!; done
freestone rewind job; mount -t ext4 "$job" mnt; [ "$(md5sum <mnt/file)" = "$sum" ] || wrong "the rewind has no effect"; umount mnt
echo "ok   publish and unpublish, a fork that is mounted, rewound, mounted again"

freestone set r disksize=256M >/dev/null
case $(uname -r) in 6.12*) wanted=262144;; *) wanted=524288;; esac
[ "$(blockdev --getsz "$disk")" = $wanted ] || wrong "size $(blockdev --getsz "$disk") after it has grown"
echo "ok   a disk that grows: $wanted sectors"

mount -t ext4 "$disk" mnt; kill -9 $server; wait $server || true
ls mnt >/dev/null 2>&1 || true; umount mnt || umount -l mnt
begin r=ram,disksize=64M
grep -q "was left by a killed server: removed" err || wrong "no device of the killed server was removed"
disk=$(sed -n 's/^r: \(\/dev\/ublkb.*\)/\1/p' out); [ "$(blockdev --getsz "$disk")" = 131072 ] || wrong "the size is wrong"
kill -TERM $server; wait $server || wrong "the server ends with $?"
[ -z "$(ls /dev | grep ublkb)" ] || wrong "block devices are left: $(ls /dev | grep ublk)"
echo "ok   block devices of a killed server are removed, and none are left at the end"
