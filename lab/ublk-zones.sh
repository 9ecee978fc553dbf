#!/bin/sh
# ublk-zones.sh drive|files - runs in the kernel lab (see run-ublk-zones.sh): zoned block devices of the program. Its first mistake
# ends it.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run
for module in ublk_drv crc32c_generic f2fs btrfs zonefs; do modprobe $module 2>/dev/null || true; done
mkdir -p /tmp/lab/mnt; cd /tmp/lab
trap '[ $? = 0 ] || tail -n 5 err out said' EXIT
wrong() { echo "FAIL $1"; dmesg | tail -n 5; exit 1; }
soon() { for _ in $(seq 100); do "$@" && return; sleep 0.1; done; wrong "not in time: $*"; }
absent() { [ ! -e "$1" ]; }
begin() { # devices..: DISK is that of the first
  freestone serve "$@" --ublk >out 2>err & server=$!; freestone wait || wrong "no server"
  DISK=$(sed -n 's/^z: \(\/dev\/ublkb.*\)/\1/p' out); [ -b "$DISK" ] || wrong "no block device is told"; QUEUE=/sys/block/${DISK#/dev/}/queue; }
end() { kill -TERM $server; wait $server || wrong "it ends with $?"; soon absent "$DISK"; }
attr() { [ "$(cat $QUEUE/$1)" = "$2" ] || wrong "$1: wanted $2, found $(cat $QUEUE/$1)"; }
fails() { "$@" >said 2>&1 && wrong "it succeeds: $*" || true; }
condition() { # ZONE-NUMBER CONDITION
  blkzone report -o $(($1*16384)) -c 1 $DISK >said; grep -q "zcond:.*($2)" said || wrong "zone $1: wanted $2, found $(cat said)"; }
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
  dd if=$DISK bs=4k skip=4096 count=256 iflag=direct status=none | cmp -n 1048576 - noise || wrong "another content"
  fails put 2 128 8
  blkzone close -o $((2*16384)) -c 1 $DISK; condition 2 cl
  blkzone open -o $((2*16384)) -c 1 $DISK; condition 2 oe
  blkzone finish -o $((2*16384)) -c 1 $DISK; condition 2 fu; agree "after finish"
  fails put 2 256 8
  blkzone reset -o $((2*16384)) -c 1 $DISK; condition 2 em
  put 1 4 16; put 0 2040 16   # conventional zones, also across their border
  dd if=$DISK bs=4k skip=2040 count=16 iflag=direct status=none | cmp -n 65536 - noise || wrong "conventional zones have another content"
  echo "ok   zones are written, read, closed, opened, finished, reset"

  blkzone open -o $((4*16384)) -c 4 $DISK; fails blkzone open -o $((8*16384)) -c 1 $DISK; fails put 8 0 8
  condition 8 em   # since Linux 6.13 a zone takes no write after one that failed before it was reported
  blkzone close -o $((4*16384)) -c 4 $DISK; condition 5 em
  for zone in 4 5 6 7 8 9; do put $zone 0 8; blkzone close -o $((zone*16384)) -c 1 $DISK; done
  fails put 10 0 8; grep -q "Value too large" said || wrong "the limit of active zones: $(cat said)"
  agree "at the limit"; blkzone reset $DISK; condition 9 em; condition 1 nw; put 10 0 8; blkzone reset $DISK; agree "after all were reset"
  echo "ok   limits of open and active zones, and a reset of all"

  freestone set z zone_readonly=64M >/dev/null; freestone set z zone_offline=72M >/dev/null
  condition 8 ro; condition 9 of; agree "with zones out of order"
  dd if=$DISK of=/dev/null bs=4k skip=$((8*2048)) count=8 iflag=direct status=none || wrong "a read-only zone is not read"
  fails dd if=$DISK of=/dev/null bs=4k skip=$((9*2048)) count=8 iflag=direct status=none; fails put 8 0 8
  freestone set z zone_readonly=64M >/dev/null; freestone set z zone_offline=72M >/dev/null; condition 8 em; condition 9 em
  echo "ok   a read-only and an offline zone"

  fio --name=v --filename=$DISK --zonemode=zbd --rw=randwrite --bs=16k --direct=1 --ioengine=io_uring --iodepth=16 --offset=16m \
    --size=96m --io_size=32m --max_open_zones=4 --verify=crc32c --verify_fatal=1 --randseed=7 >said 2>&1 || wrong "fio does not verify"
  fio --name=s --filename=$DISK --zonemode=zbd --rw=write --bs=4k --direct=1 --ioengine=io_uring --iodepth=32 --offset=16m \
    --size=48m --max_open_zones=4 --verify=crc32c --verify_fatal=1 >said 2>&1 || wrong "fio does not verify"
  grep -l iou-wrk /proc/$server/task/*/comm >said 2>/dev/null && wrong "copies of data are not done where they are handed over"
  agree "after fio"
  echo "ok   fio verifies, and the kernel copies without threads of its own"

  fails freestone publish z --ublk --template
  mkdir -p held; blkzone reset $DISK
  end
  begin z=null,size=64M,memory_backed=1,zoned=1,zone_size=8M n=null,size=64M,zoned=1,zone_size=8M,zone_append_max_sectors=0,publish=no
  freestone publish n --ublk 2>said && wrong "zones without appends are published"; grep -q "without appends" said || wrong "$(cat said)"
  freestone unpublish z; soon absent $DISK; DISK=$(freestone publish z --ublk); agree "when it was published again"
  kill -9 $server; wait $server || true; soon absent $DISK
  begin z=null,size=64M,memory_backed=1,zoned=1,zone_size=8M; grep -q "was left by a killed server: removed" err || wrong "nothing was left"
  end
  echo "ok   what cannot be shown, and what a killed server left"
}

$1
