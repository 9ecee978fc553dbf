#!/bin/sh
# ublk-program.sh - runs in the kernel lab (see run-ublk.sh): block devices of the program itself. Its first mistake ends it.
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
[ -b "$disk" ] || wrong "no block device is told"
freestone list | grep -q "$disk" || wrong "list does not show it"
[ "$(blockdev --getsz "$disk")" = 262144 ] || wrong "another size"
mkfs.ext4 -q "$disk"; mount -t ext4 "$disk" mnt
dd if=/dev/urandom of=mnt/file bs=1M count=40 conv=fsync status=none
sum=$(md5sum <mnt/file)
for verb in unpublish remove reset; do
  freestone $verb r 2>said && wrong "$verb of a mounted disk succeeds"
  grep -q "a client is connected" said || wrong "$verb: $(cat said)"; done
umount mnt; mount -t ext4 "$disk" mnt; [ "$(md5sum <mnt/file)" = "$sum" ] || wrong "another content"; umount mnt
echo "ok   a file system on serve --ublk, and refusals while it is mounted"

other=$(freestone publish n --ublk --queues 2)
[ -b "$other" ] && [ "$(ls /sys/block/${other#/dev/}/mq | wc -l)" = 2 ] || wrong "not two queues: $other"
dd if="$other" of=/dev/null bs=1M iflag=direct status=none
freestone unpublish n; soon absent "$other"
freestone snapshot r golden >/dev/null; freestone fork golden job >/dev/null
job=$(freestone publish job --ublk); mount -t ext4 "$job" mnt; [ "$(md5sum <mnt/file)" = "$sum" ] || wrong "a fork has another content"
rm mnt/file; umount mnt; freestone rewind job
mount -t ext4 "$job" mnt; [ "$(md5sum <mnt/file)" = "$sum" ] || wrong "it was not rewound"; umount mnt
echo "ok   publish and unpublish, a fork that is mounted, rewound, mounted again"

freestone set r disksize=256M >/dev/null
case $(uname -r) in 6.12*) wanted=262144;; *) wanted=524288;; esac
[ "$(blockdev --getsz "$disk")" = $wanted ] || wrong "size $(blockdev --getsz "$disk") after it has grown"
echo "ok   a disk that grows: $wanted sectors"

mount -t ext4 "$disk" mnt; kill -9 $server; wait $server || true
ls mnt >/dev/null 2>&1 || true; umount mnt || umount -l mnt
begin r=ram,disksize=64M
grep -q "was left by a killed server: removed" err || wrong "nothing was left and removed"
disk=$(sed -n 's/^r: \(\/dev\/ublkb.*\)/\1/p' out); [ "$(blockdev --getsz "$disk")" = 131072 ] || wrong "another size"
kill -TERM $server; wait $server || wrong "it ends with $?"
[ -z "$(ls /dev | grep ublkb)" ] || wrong "block devices are left: $(ls /dev | grep ublk)"
echo "ok   what a killed server left is removed, and nothing is left at the end"
