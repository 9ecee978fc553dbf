#!/bin/sh
# ublk-zones.sh drive|files - runs in the kernel lab (see run-ublk-zones.sh): zoned block devices of the program. Ends at the
# first failure.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run
for module in ublk_drv crc32_generic crc32c_generic; do modprobe $module 2>/dev/null || true; done
mkdir -p /tmp/lab/mnt; cd /tmp/lab
trap '[ $? = 0 ] || { tail -n 5 err out said; dmesg | tail -n 5; }' EXIT
wrong() { echo "FAIL $1"; exit 1; }
soon() { for _ in $(seq 100); do "$@" && return; sleep 0.1; done; wrong "not in time: $*"; }
absent() { [ ! -e "$1" ]; }
begin() { # devices..: DISK is that of the first
  freestone serve "$@" --ublk >out 2>err & server=$!; freestone wait --timeout 2m || wrong "no server"
  DISK=$(sed -n 's/^z: \(\/dev\/ublkb.*\)/\1/p' out); [ -b "$DISK" ] || wrong "the server prints no block device"; QUEUE=/sys/block/${DISK#/dev/}/queue; }
end() { kill -TERM $server; wait $server || wrong "the server ends with $?"; soon absent "$DISK"; }
attr() { [ "$(cat $QUEUE/$1)" = "$2" ] || wrong "$1: expected $2, found $(cat $QUEUE/$1)"; }
fails() { "$@" >said 2>&1 && wrong "succeeds: $*" || true; }
condition() { # ZONE-NUMBER CONDITION
  blkzone report -o $(($1*16384)) -c 1 $DISK >said; grep -q "zcond:.*($2)" said || wrong "zone $1: expected $2, found $(cat said)"; }
agree() { # what the kernel and the program say of the zones
  blkzone report $DISK >kernel; freestone zones z report >ours; diff kernel ours >said || wrong "reports differ $1"; }
put() { # ZONE BLOCK COUNT: at a write pointer
  dd if=noise of=$DISK bs=4k seek=$(($1*2048+$2)) count=$3 oflag=direct conv=notrunc status=none; }

drive() {
  begin z=null,size=256M,memory_backed=1,zoned=1,zone_size=8M,zone_capacity=6M,zone_nr_conv=2,zone_max_open=4,zone_max_active=6
  attr zoned host-managed; attr chunk_sectors 16384; attr nr_zones 32; attr max_open_zones 4; attr max_active_zones 6
  attr logical_block_size 4096; attr zone_append_max_bytes 524288
  dd if=/dev/urandom of=noise bs=1M count=8 status=none
  agree "at the start"
  echo "ok   zones and limits are those of the drive"

  put 2 0 256; condition 2 oi; agree "after a write"
  dd if=$DISK bs=4k skip=4096 count=256 iflag=direct status=none | cmp -n 1048576 - noise || wrong "the content differs"
  fails put 2 128 8
  blkzone close -o $((2*16384)) -c 1 $DISK; condition 2 cl
  blkzone open -o $((2*16384)) -c 1 $DISK; condition 2 oe
  blkzone finish -o $((2*16384)) -c 1 $DISK; condition 2 fu; agree "after finish"
  fails put 2 256 8
  blkzone reset -o $((2*16384)) -c 1 $DISK; condition 2 em
  put 1 4 16; put 0 2040 16   # conventional zones, also across their border
  dd if=$DISK bs=4k skip=2040 count=16 iflag=direct status=none | cmp -n 65536 - noise || wrong "conventional zones have different content"
  echo "ok   zones are written, read, closed, opened, finished, reset"

  blkzone open -o $((4*16384)) -c 4 $DISK; fails blkzone open -o $((8*16384)) -c 1 $DISK; fails put 8 0 8
  condition 8 em   # a zone of Linux 7 takes no write after one that failed before it was reported
  blkzone close -o $((4*16384)) -c 4 $DISK; condition 5 em
  for zone in 4 5 6 7 8 9; do put $zone 0 8; blkzone close -o $((zone*16384)) -c 1 $DISK; done
  fails put 10 0 8; grep -q "Value too large" said || wrong "the limit of active zones: $(cat said)"
  agree "at the limit"; blkzone reset $DISK; condition 9 em; condition 1 nw; put 10 0 8; blkzone reset $DISK; agree "after all were reset"
  echo "ok   limits of open and active zones, and a reset of all"

  freestone set z zone_readonly=64M >/dev/null; freestone set z zone_offline=72M >/dev/null
  condition 8 ro; condition 9 of; agree "with zones out of order"
  dd if=$DISK of=/dev/null bs=4k skip=$((8*2048)) count=8 iflag=direct status=none || wrong "a read-only zone cannot be read"
  fails dd if=$DISK of=/dev/null bs=4k skip=$((9*2048)) count=8 iflag=direct status=none; fails put 8 0 8
  freestone set z zone_readonly=64M >/dev/null; freestone set z zone_offline=72M >/dev/null; condition 8 em; condition 9 em
  echo "ok   a read-only and an offline zone"

  fio --name=v --filename=$DISK --zonemode=zbd --rw=randwrite --bs=16k --direct=1 --ioengine=io_uring --iodepth=16 --offset=16m \
    --size=96m --io_size=32m --max_open_zones=4 --verify=crc32c --verify_fatal=1 --randseed=7 >said 2>&1 || wrong "fio does not verify"
  fio --name=s --filename=$DISK --zonemode=zbd --rw=write --bs=4k --direct=1 --ioengine=io_uring --iodepth=32 --offset=16m \
    --size=48m --max_open_zones=4 --verify=crc32c --verify_fatal=1 >said 2>&1 || wrong "fio does not verify"
  for queue in $(grep -l '^ublk0q' /proc/$server/task/*/comm); do queue=${queue%/comm}
    grep -q "^iou-wrk-${queue##*/}$" /proc/$server/task/*/comm && wrong "a kernel thread copies data"; done
  agree "after fio"
  echo "ok   fio verifies, and the kernel copies without threads of its own"

  end
  begin z=null,size=66G,zoned=1,zone_size=4M; attr nr_zones 16896   # more than the kernel asks for at once
  [ "$(blkzone report $DISK | wc -l)" = 16896 ] || wrong "not all zones are reported"
  end
  echo "ok   a report of 16896 zones"

  begin z=null,size=64M,memory_backed=1,zoned=1,zone_size=8M n=null,size=64M,zoned=1,zone_size=8M,zone_append_max_sectors=0,publish=no
  freestone publish n --ublk 2>said && wrong "zones without appends are published"; grep -q "without appends" said || wrong "$(cat said)"
  freestone unpublish z; soon absent $DISK; DISK=$(freestone publish z --ublk); agree "when it was published again"
  kill -9 $server; wait $server || true; soon absent $DISK
  begin z=null,size=64M,memory_backed=1,zoned=1,zone_size=8M; grep -q "was left by a killed server: removed" err || wrong "no device of the killed server was removed"
  end
  echo "ok   refused zones, and removal of the devices of a killed server"
}

# ---- file systems --------------------------------------------------------------------------------------------------------

fill() { # files with sums, that are durable
  for file in a b c; do dd if=/dev/urandom of=mnt/$file bs=1M count=${1:-4} status=none; done
  sync; (cd mnt && md5sum a b c) >sums; }
check() { (cd mnt && md5sum -c --quiet ../sums) >said 2>&1 || wrong "$1: the content differs"; }
load() { (n=0; while :; do n=$((n+1)); dd if=/dev/zero of=mnt/load.$((n%4)) bs=64k count=48 oflag=direct conv=fsync status=none || break; done) 2>/dev/null & client=$!; }
unload() { kill $client 2>/dev/null || true; wait $client 2>/dev/null || true; umount mnt 2>said || { sleep 2; umount mnt; }; }
lives() { # NAME CHECKER..: a file system on DISK, through what a drive and its server go through
  name=$1; shift
  mount -t $name $DISK mnt; fill
  for verb in unpublish remove reset; do fails freestone $verb z; done
  umount mnt; mount -t $name $DISK mnt; check "$name, mounted again"
  rm mnt/a; fill 3; check "$name, filled again"; umount mnt
  "$@" $DISK >said 2>&1 || wrong "$name: the checker reports errors"
  echo "ok   $name: filled, mounted again, checked; refusals while it is mounted"
  mount -t $name $DISK mnt; load; sleep 3
  freestone power-cut z; sleep 1; unload
  freestone unpublish z --force; soon absent $DISK; DISK=$(freestone publish z --ublk); agree "$name, after a power cut"
  mount -t $name $DISK mnt || wrong "$name: not mounted after a power cut"; check "$name, after a power cut"; umount mnt
  "$@" $DISK >said 2>&1 || wrong "$name: the checker reports errors after a power cut"
  echo "ok   $name: power cut under load"
  end; }
killed() { # NAME CHECKER..: the same on a file whose server is killed
  name=$1; shift
  mount -t $name $DISK mnt; fill; load; sleep 3
  kill -9 $server; wait $server 2>/dev/null || true; unload; soon absent $DISK
  begin z=file,path=image,$ZONES
  mount -t $name $DISK mnt || wrong "$name: not mounted after its server was killed"; check "$name, killed"; umount mnt
  "$@" $DISK >said 2>&1 || wrong "$name: the checker reports errors after its server was killed"
  echo "ok   $name: server killed under load"
  end; rm -f image image.zones; }

f2fs() {
  modprobe f2fs; ZONES=zoned=1,zone_size=4M,zone_nr_conv=16,zone_max_open=8,zone_max_active=8
  begin z=null,size=320M,memory_backed=1,cache_size=64M,$ZONES
  mkfs.f2fs -q -m $DISK >said 2>&1 || wrong "mkfs.f2fs"; lives f2fs fsck.f2fs
  truncate -s 320M image; begin z=file,path=image,$ZONES
  mkfs.f2fs -q -m $DISK >said 2>&1 || wrong "mkfs.f2fs"; killed f2fs fsck.f2fs; }

btrfs_() {
  modprobe btrfs; ZONES=zoned=1,zone_size=8M,zone_max_open=16,zone_max_active=16
  begin z=null,size=512M,memory_backed=1,cache_size=64M,$ZONES
  mkfs.btrfs -q -O zoned -d single -m single $DISK >said 2>&1 || wrong "mkfs.btrfs"; lives btrfs btrfs check
  truncate -s 512M image; begin z=file,path=image,$ZONES
  mkfs.btrfs -q -O zoned -d single -m single $DISK >said 2>&1 || wrong "mkfs.btrfs"; killed btrfs btrfs check; }

zonefs() { # a file a zone: the first has the super block
  modprobe zonefs
  begin z=null,size=128M,memory_backed=1,cache_size=16M,zoned=1,zone_size=8M,zone_nr_conv=2,zone_max_open=4
  dd if=/zonefs of=$DISK bs=4k oflag=direct conv=notrunc,fsync status=none
  mount -t zonefs $DISK mnt; [ "$(ls mnt/seq | wc -l)" = 14 ] && [ "$(ls mnt/cnv | wc -l)" = 1 ] || wrong "zonefs has other files: $(ls mnt/*)"
  dd if=/dev/urandom of=noise bs=64k count=32 status=none
  dd if=noise of=mnt/seq/3 bs=64k oflag=direct,append conv=notrunc,fsync status=none; sync
  [ "$(stat -c %s mnt/seq/3)" = 2097152 ] || wrong "zonefs: a file of $(stat -c %s mnt/seq/3)"; cmp noise mnt/seq/3 || wrong "zonefs has different content"
  condition 5 oi; fails dd if=noise of=mnt/seq/3 bs=64k count=1 oflag=direct conv=notrunc status=none
  dd if=noise of=mnt/cnv/0 bs=64k count=4 conv=notrunc,fsync status=none; cmp -n 262144 noise mnt/cnv/0 || wrong "zonefs: a conventional zone has different content"
  truncate -s 8M mnt/seq/4; condition 6 fu; truncate -s 0 mnt/seq/4; condition 6 em
  dd if=noise of=mnt/seq/7 bs=64k count=8 oflag=direct,append conv=notrunc status=none; umount mnt
  freestone power-cut z; freestone unpublish z; soon absent $DISK; DISK=$(freestone publish z --ublk); agree "zonefs, after a power cut"
  mount -t zonefs $DISK mnt; cmp noise mnt/seq/3 || wrong "zonefs has different content after a power cut"
  cmp -n "$(stat -c %s mnt/seq/7)" noise mnt/seq/7 || wrong "zonefs: the content below a write pointer differs"; umount mnt
  echo "ok   zonefs: zones are appended to, filled, emptied; power cut"
  end; }

files() { btrfs_; zonefs; f2fs; }

$1
