#!/bin/sh
# ublk-recovery.sh - runs in the kernel lab (see run-ublk.sh): block devices of a recoverable server that is killed and upgraded again and again, under a
# file system with a writer and under a verifying client. Ends at the first failure.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run
for module in ublk_drv crc32c_generic crc32_generic ext4; do modprobe $module 2>/dev/null || true; done
mkdir -p /tmp/lab/mnt; cd /tmp/lab
wrong() { echo "FAIL $1"; tail -n 20 err; freestone list 2>&1 || true; dmesg | tail -n 40; exit 1; }
soon() { for _ in $(seq 300); do "$@" && return; sleep 0.1; done; wrong "not in time: $*"; }
ended() { ! kill -0 $1 2>/dev/null || grep -q '^State:.Z' /proc/$1/status; }
no_stuck() { ! grep -q '^State:.D' /proc/[0-9]*/task/[0-9]*/status 2>/dev/null; }
no_disk() { ! ls /dev | grep -q 'ublk[bc]'; }
io_errors() { dmesg | grep -i 'i/o error\|ext4-fs error\|hung task\|blocked for more\|BUG:\|general protection'; }
holder() { for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^freestone hold ' && basename $p; done || true; }
begin() { freestone serve --state state "$@" >out 2>>err & server=$!; }
ready() { freestone wait --timeout 3m 2>/dev/null || wrong "no server"; }
killed() { kill -9 $server; wait $server 2>/dev/null || true; }

dd if=/dev/zero of=golden.img bs=1M count=0 seek=96 status=none
begin --recoverable r=ram,disksize=192M,publish=no golden=file,path=golden.img,readonly=yes,publish=no; ready
disk=$(freestone publish r --ublk --queues 2); freestone fork golden job >/dev/null; job=$(freestone publish job --ublk --queues 1)
mkfs.ext4 -q "$disk"; mount -t ext4 "$disk" mnt

# The writer keeps the sums of files that fsync has reported as durable, and removes old files now and then.
writer() {
  n=0; while [ ! -e stop ]; do
    n=$((n + 1)); f=f$((n % 40))
    sed -i "/ $f\$/d" durable || return 1
    dd if=/dev/urandom of=new bs=64k count=$((n % 7 + 1)) status=none || return 1
    dd if=new of=mnt/$f bs=64k conv=fsync status=none || return 1
    echo "$(md5sum <new | cut -d' ' -f1)  $f" >>durable
    [ $((n % 10)) != 0 ] || rm mnt/f$((n % 37)) 2>/dev/null && sed -i "/ f$((n % 37))\$/d" durable || true
    echo $n >count.new; mv count.new count; done; }
touch durable; echo 0 >count
(writer 2>writer.err && echo ended >writer.end) & writer=$!
# The client writes random blocks and verifies each by reading it again.
(while [ ! -e stop ]; do fio --name=v --filename="$job" --rw=randrw --rwmixread=30 --bsrange=4k-128k --direct=1 --ioengine=io_uring \
  --iodepth=16 --size=64m --io_size=24m --verify=crc32c --verify_fatal=1 --verify_backlog=64 >fio.out 2>&1 || exit 1; done; echo ended >fio.end) & client=$!
progress() { was=$(cat count); for _ in $(seq 600); do
    [ -e writer.end ] || ended $writer && wrong "the writer ends: $(cat writer.err)"; ended $client && wrong "the client ends: $(tail fio.out)"
    [ "$(cat count)" -gt $((was + 2)) ] && return; sleep 0.1; done; wrong "the writer stands still at $was"; }
progress
for n in 1 2 3 4 5 6 7 8 9 10; do
  killed; begin --recoverable
  # Every third server is killed while it starts, at another moment each time.
  if [ $((n % 3)) = 0 ]; then sleep 0.$n; killed; begin --recoverable; fi
  ready; progress
  freestone list | grep '^r ' | grep -q "adopted.* $disk\$" || wrong "r is not at $disk: $(freestone list)"
  freestone list | grep '^job ' | grep -q "adopted.* $job\$" || wrong "job is not at $job: $(freestone list)"; done
[ "$(ls /sys/block/${disk#/dev/}/mq | wc -l)" = 2 ] || wrong "not two queues"
echo "ok   a file system and a verifying client over 13 kills: the writer has written $(cat count) files"

# Another program takes the place of the server, in the same process.
for n in 1 2 3 4 5; do
  freestone upgrade >/dev/null 2>&1 || wrong "an upgrade fails: $(freestone upgrade 2>&1)"; progress
  freestone list | grep '^r ' | grep -q "adopted.* $disk\$" || wrong "r is not at $disk after an upgrade: $(freestone list)"; done
ended $server && wrong "the server has another process"
echo "ok   five upgrades: the writer has written $(cat count) files"

# A start that fails leaves the block devices for the next one, before and after it has attached them.
killed; freestone serve --state state --recoverable --nbd unix:/absent/nbd.sock >out 2>>err && wrong "a start without its address succeeds"
freestone serve --state state --recoverable --apply x=file,path=/absent >out 2>>err && wrong "a start with an absent file succeeds"
tail -n 1 err | grep -q 'x: /absent: .*; 0 of 1 changes were made' || wrong "the start does not fail at its end"
begin --recoverable; ready; progress
touch stop; soon ended $writer; soon ended $client; [ -e writer.end ] && [ -e fio.end ] || wrong "$(cat writer.err; tail fio.out)"
umount mnt; e2fsck -fn "$disk" >said 2>&1 || wrong "fsck: $(cat said)"
mount -t ext4 "$disk" mnt; (cd mnt && md5sum -c --status) <durable || wrong "files differ: $(cd mnt && md5sum -c <../durable 2>&1 | grep -v OK)"
echo "ok   failed starts leave the block devices; fsck finds nothing, and $(wc -l <durable) durable files are there"

# The disk grows, and the next server keeps that.
freestone set r disksize=256M >/dev/null; size=$(blockdev --getsz "$disk"); killed; begin --recoverable; ready
[ "$(blockdev --getsz "$disk")" = "$size" ] || wrong "size $(blockdev --getsz "$disk") instead of $size"
(cd mnt && md5sum -c --status) <durable || wrong "files differ after the disk has grown"
io_errors && wrong "the kernel's log"
umount mnt; kill -TERM $server; wait $server || wrong "the server ends with $?"
soon no_disk; [ -z "$(holder)" ] || wrong "a holder is left"
echo "ok   an orderly end leaves no block device and no holder"

# A device that cannot be created again keeps its block device, until it is removed.
rm -rf state; begin --recoverable golden=file,path=golden.img,readonly=yes,publish=no; ready
freestone fork golden job >/dev/null; job=$(freestone publish job --ublk); killed; mv golden.img away
begin --recoverable; ready; freestone list | grep -q '^job .*adopted' && wrong "job exists without its base"; [ -b "$job" ] || wrong "no $job"
freestone remove job; soon no_disk; kill -9 $(holder); kill -TERM $server; wait $server || wrong "the server ends with $?"
echo "ok   a missing device keeps its block device until it is removed"

# Without its content, the block device of a killed server is removed: requests fail, and nothing hangs.
lost() { # options of the next server
  rm -rf state; begin --recoverable r=ram,disksize=64M,publish=no; ready; disk=$(freestone publish r --ublk)
  mkfs.ext4 -q "$disk"; mount -t ext4 "$disk" mnt
  kill -9 $server $(holder); wait $server 2>/dev/null || true
  dd if=/dev/zero of=mnt/file bs=64k count=8 conv=fsync status=none 2>/dev/null & client=$!
  begin "$@"; ready; soon ended $client; wait $client && wrong "a write to lost content succeeds"
  umount mnt || wrong "umount of a removed disk"
  grep -q 'was removed: its content was not adopted' err || wrong "no warning"; soon no_disk
  kill -TERM $server; wait $server || wrong "the server ends with $?"; : >err; }
lost --recoverable; lost
soon no_stuck; no_disk || wrong "block devices are left: $(ls /dev | grep ublk)"
dmesg | grep -i 'hung task\|blocked for more\|BUG:\|general protection' && wrong "the kernel's log" || true
echo "ok   block devices without content are removed, by a recoverable server and by another one"
