#!/bin/sh
# ublk.sh - runs in the kernel lab (see run-ublk.sh): a Freestone RAM disk at /dev/ublkbN: files, discards, growth, removal under
# load, a killed server, a device that never completes requests. Prints a line per check.
set -u
export LC_ALL=C
DIR=/tmp/lab; mkdir -p $DIR; cd $DIR
CHECKS=0 FAILED=0 MIB=128

# ---- checks --------------------------------------------------------------------------------------------------------------

failed() { CHECKS=$((CHECKS+1)) FAILED=$((FAILED+1)); printf 'FAIL %s\n' "$1"; }
passed() { CHECKS=$((CHECKS+1)); printf 'ok   %s\n' "$1"; }
same() { # WHAT WANTED FOUND
  [ "$2" = "$3" ] && passed "$1: $3" || failed "$1: expected $2, found $3"; }
works() { # WHAT COMMAND..
  what=$1; shift; "$@" >said 2>&1 && passed "$what" || { failed "$what"; sed 's/^/     /' said | tail -n 5; }; }
fails() { # WHAT COMMAND..
  what=$1; shift; "$@" >said 2>&1 && failed "$what: succeeds" || passed "$what: $(tail -n 1 said | cut -c1-80)"; }
soon() { # SECONDS COMMAND..: until it succeeds
  tenths=$(($1*10)); shift
  while ! "$@" 2>/dev/null; do [ $tenths -gt 0 ] || return 1; tenths=$((tenths-1)); sleep 0.1; done; }
absent() { [ ! -e "$1" ]; }
says() { grep -q "$1" out; }
ended() { ! kill -0 $1 2>/dev/null || grep -q '^State:.Z' /proc/$1/status; }
stuck() { # threads in uninterruptible sleep
  for status in /proc/[0-9]*/task/[0-9]*/status; do
    grep -q '^State:.D' $status 2>/dev/null && grep '^Name' $status; done; }
no_stuck() { [ -z "$(stuck)" ]; }

# ---- a server ------------------------------------------------------------------------------------------------------------

begin() { # [MIB [QUEUES]]: DISK and SERVER
  : >out; serve ${1:-$MIB} ${2:-} >out 2>err & SERVER=$!
  soon 40 says /dev/ublkb || { failed "a server begins: $(cat err)"; return 1; }
  DISK=$(grep -m 1 /dev/ublkb out); CHAR=$(echo $DISK | sed s/ublkb/ublkc/); }
end() { # [SAID]
  kill -TERM $SERVER; soon 60 ended $SERVER || failed "the server ends"
  wait $SERVER 2>/dev/null
  same "the last line of the server" "${1:-ended}" "$(tail -n 1 out)"
  [ "${1:-}" = "let go" ] || same "warnings of the server" "" "$(cat err)"
  soon 5 absent $DISK && absent $CHAR && passed "its nodes are removed" || failed "nodes are left: $(ls /dev/ublk*)"; }

# ---- operations of a disk ------------------------------------------------------------------------------------------------

whole() {
  begin || return
  same "size in sectors" $((MIB*2048)) $(blockdev --getsz $DISK)
  same "logical block size" 512 $(blockdev --getss $DISK)
  same "physical block size" 4096 $(blockdev --getpbsz $DISK)
  same "rotational" 0 $(cat /sys/block/${DISK#/dev/}/queue/rotational)
  same "write cache" "write through" "$(cat /sys/block/${DISK#/dev/}/queue/write_cache)"
  same "discard granularity" 4096 $(cat /sys/block/${DISK#/dev/}/queue/discard_granularity)
  dd if=/dev/urandom of=noise bs=1M count=32 status=none
  works "write, direct, 1 MiB" dd if=noise of=$DISK bs=1M oflag=direct status=none
  works "reads return the same" cmp -n 33554432 noise $DISK
  works "write, direct, odd pieces" dd if=noise of=$DISK bs=3584 seek=11 count=2000 oflag=direct status=none
  dd if=$DISK of=back bs=3584 skip=11 count=2000 iflag=direct status=none
  works "reads of odd pieces return the same" cmp -n 7168000 noise back
  works "write, through the cache" dd if=noise of=$DISK bs=4k count=4096 conv=fsync status=none
  works "discard" blkdiscard -o 8388608 -l 8388608 $DISK
  dd if=$DISK of=back bs=1M skip=8 count=8 iflag=direct status=none
  works "discarded blocks read as zeroes" cmp -n 8388608 back /dev/zero
  works "zeroes" blkdiscard -z -o 1048576 -l 1048576 $DISK
  dd if=$DISK of=back bs=1M skip=1 count=1 iflag=direct status=none
  works "zeroed blocks read as zeroes" cmp -n 1048576 back /dev/zero
  dd if=$DISK of=back bs=1M count=1 iflag=direct status=none
  works "blocks before them are unchanged" cmp -n 1048576 noise back
  fails "a write beyond the end" dd if=noise of=$DISK bs=4k seek=$((MIB*256)) count=1 oflag=direct status=none
  end; }

files() {
  begin || return
  works "mkfs" mkfs.ext4 -q -F $DISK
  mkdir -p mnt; works "mount" mount -t ext4 -o discard $DISK mnt
  for n in 1 2 3 4; do dd if=/dev/urandom of=mnt/$n bs=1M count=16 status=none; done
  (cd mnt && md5sum 1 2 3 4) >sums; sync; echo 3 >/proc/sys/vm/drop_caches
  (cd mnt && md5sum 1 2 3 4) >sums.back; [ -s sums ] || failed "no sums"; works "files have the same content" cmp sums sums.back
  dd if=/dev/zero of=mnt/full bs=1M status=none 2>/dev/null; sync
  (cd mnt && md5sum 1 2 3 4) >sums.back; works "files have the same content on a full disk" cmp sums sums.back
  rm mnt/full mnt/1; works "umount" umount mnt
  works "fsck" e2fsck -f -n $DISK
  works "mount again" mount -t ext4 $DISK mnt
  (cd mnt && md5sum 2 3 4) >sums.back; grep -v ' 1$' sums >sums.wanted
  works "the files are there" cmp sums.wanted sums.back
  umount mnt; end; }

random() { # what a verifying client does
  begin $MIB 2 || return
  works "fio verifies" fio --name=v --filename=$DISK --rw=randwrite --bsrange=512-256k --direct=1 --ioengine=io_uring \
    --iodepth=32 --size=96m --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_backlog=64 --randseed=7
  works "two queues from two jobs" fio --name=v --filename=$DISK --rw=randrw --bs=4k --direct=1 --ioengine=io_uring --iodepth=32 \
    --size=48m --offset_increment=48m --numjobs=2 --verify=crc32c --verify_fatal=1 --group_reporting
  end; }

counted() { # FIO-OPTION..: ENTERED calls of the queue for REQUESTS
  echo 'hist:keys=common_pid.execname' >$event/trigger
  fio --name=c --filename=$DISK --rw=randread --bs=4k --direct=1 --ioengine=io_uring --iodepth=32 --size=64m "$@" >said 2>&1
  REQUESTS=$(grep -o 'rwts: total=[0-9]*' said | head -n 1 | grep -o '[0-9]*$')
  ENTERED=$(grep 'ublk.*q0' $event/hist | grep -o 'hitcount: *[0-9]*' | grep -o '[0-9]*')
  echo '!hist:keys=common_pid.execname' >$event/trigger
  echo "     4 KiB at depth 32 $*: ${ENTERED:=0} calls for ${REQUESTS:=0} requests, $(grep -o 'IOPS=[^,]*' said | head -n 1)"; }

calls() { # system calls of a queue, at depth 32
  trace=/sys/kernel/tracing; [ -d $trace/events ] || mount -t tracefs trace $trace 2>/dev/null
  event=$trace/events/syscalls/sys_enter_io_uring_enter
  [ -e $event/trigger ] || { echo "     this kernel cannot count system calls"; return; }
  begin $MIB 1 || return
  dd if=/dev/urandom of=$DISK bs=1M oflag=direct status=none 2>/dev/null
  # With single requests, a queue takes those that have arrived; their number depends on timing.
  counted
  [ $ENTERED -gt 0 ] && [ $ENTERED -lt $REQUESTS ] && passed "fewer calls than requests" || failed "a call for each request"
  counted --iodepth_batch_submit=8 --iodepth_batch_complete_min=1 --iodepth_batch_complete_max=16
  # Eight requests arrive at a time: a call per eight requests plus a few is the best that a slow queue can reach.
  [ $ENTERED -gt 0 ] && [ $((ENTERED*7)) -le $REQUESTS ] && passed "at most one call for seven requests" \
    || failed "more than one call for seven requests"
  end; }

growth() {
  begin 64 || return
  kill -USR1 $SERVER; sleep 1
  if grep -q grown out; then same "size after growth" $((128*2048)) $(blockdev --getsz $DISK)
    works "write beyond the old end" dd if=/dev/urandom of=$DISK bs=1M seek=100 count=8 oflag=direct status=none
  else same "the reason why growth is not possible" "the kernel's ublk driver cannot change a size: Linux 6.16 or later is needed" "$(tail -n 1 out)"; fi
  end; }

# ---- ends ----------------------------------------------------------------------------------------------------------------

under_load() { # the server ends while clients are at work
  begin || return
  fio --name=l --filename=$DISK --rw=randrw --bs=4k --direct=1 --ioengine=io_uring --iodepth=32 --time_based --runtime=60 >said 2>&1 & CLIENT=$!
  sleep 3; end
  soon 20 ended $CLIENT && passed "the client ends" || failed "the client hangs"
  works "no task hangs" soon 10 no_stuck; stuck; }

mounted() { # the same under a file system
  begin || return
  mkfs.ext4 -q -F $DISK; mkdir -p mnt; mount -t ext4 $DISK mnt
  (while dd if=/dev/zero of=mnt/load bs=64k count=256 conv=fsync status=none 2>/dev/null; do :; done) & CLIENT=$!
  sleep 2; end
  soon 20 ended $CLIENT && passed "the client ends" || failed "the client hangs"
  works "umount" umount mnt
  works "no task hangs" soon 10 no_stuck; stuck; }

killed() { # kill -9 under a file system
  begin || return
  mkfs.ext4 -q -F $DISK; mkdir -p mnt; mount -t ext4 $DISK mnt
  (while dd if=/dev/zero of=mnt/load bs=64k count=256 conv=fsync status=none 2>/dev/null; do :; done) & CLIENT=$!
  sleep 2; kill -KILL $SERVER; wait $SERVER 2>/dev/null
  soon 30 ended $CLIENT && passed "the client ends" || failed "the client hangs"
  soon 30 absent $DISK && passed "the block device is removed" || failed "the block device is left"
  works "umount" umount mnt
  id=${DISK#/dev/ublkb}
  soon 20 eval "serve clean >cleaned 2>&1; grep -qx $id cleaned" && passed "serve clean removes the device" || failed "$(cat cleaned)"
  soon 5 absent $CHAR && passed "the character device is removed" || failed "$CHAR is left"
  same "devices left to remove" "" "$(serve clean)"
  works "no task hangs" soon 10 no_stuck; stuck
  begin && end; }

silent() { # a device that completes no more requests
  GRACE=1; export GRACE
  begin || return
  kill -USR2 $SERVER; sleep 0.5
  dd if=$DISK of=/dev/null bs=4k count=64 iflag=direct status=none 2>/dev/null & CLIENT=$!
  dd if=/dev/zero of=$DISK bs=4k count=64 conv=fsync status=none 2>/dev/null & OTHER=$!
  sleep 1; end "let go"
  soon 20 ended $CLIENT && soon 20 ended $OTHER && passed "the clients end" || failed "the clients hang"
  works "no task hangs" soon 10 no_stuck; stuck
  unset GRACE; }

memory() { # an idle queue frees the memory of its buffers
  begin $MIB 1 || return
  rss() { awk '/^RssAnon/ {print $2}' /proc/$SERVER/status; }
  has_little() { [ $(($(rss)-before)) -lt 512 ]; }
  before=$(rss)
  fio --name=m --filename=$DISK --rw=read --bs=512k --direct=1 --ioengine=io_uring --iodepth=64 --size=${MIB}m >said 2>&1
  used=$(rss); works "an idle queue frees its buffers" soon 20 has_little
  echo "     memory of the server: before $before KiB, after reads of 64 times 512 KiB $used KiB, then $(rss) KiB"
  end; }

modprobe ublk_drv; modprobe crc32c_generic 2>/dev/null; modprobe ext4 2>/dev/null
[ -e /dev/ublk-control ] || { failed "the ublk driver is missing"; exit 1; }
for part in ${*:-whole files random calls growth memory under_load mounted killed silent}; do echo "-- $part"; $part; done
dmesg 2>/dev/null | grep -i 'hung task\|blocked for more\|BUG:\|WARNING:\|general protection' >bad && { failed "the kernel's log"; head -n 20 bad; }
echo "$CHECKS checks, $FAILED failed"
[ $FAILED = 0 ]
