#!/bin/sh
# ublk-memory.sh - runs in the kernel lab (see run-ublk.sh) in a guest with little memory: fills file systems on block devices of the
# program with buffered writes of several times its size, while the server also needs memory. Ends at the first failure.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run
modprobe ublk_drv; modprobe crc32c_generic 2>/dev/null || true; modprobe ext4 2>/dev/null || true
mkdir -p /tmp/lab; cd /tmp/lab; mkdir -p back r f
wrong() { echo "FAIL $1"; cat err out; dmesg | tail -n 60; exit 1; }
soon() { for _ in $(seq 300); do "$@" && return; sleep 0.1; done; wrong "not in time: $*"; }
counted() { awk -v key="$1" 'index($1, key) == 1 {n += $2} END {print n+0}' /proc/vmstat; }
disk_of() { sed -n "s/^$1: \(\/dev\/ublkb.*\)/\1/p" out; }
# PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE are set in the ninth field of each thread's statistics.
all_flush() {
  cat /proc/$server/task/*/stat 2>/dev/null | awk '{ line = $0; sub(/.*\) /, ""); n++
    if (int($7 / 524288) % 4 != 3) { print line; wrong = 1 } } END { exit wrong || n < 5 }' >said || wrong "no I/O flusher: $(cat said)"; }

mkfs.ext4 -q -F /dev/vda; mount -t ext4 /dev/vda back
truncate -s 512M back/f.img
# A task that hangs this long would hang forever.
echo 60 >/proc/sys/kernel/hung_task_timeout_secs
freestone serve r=ram,disksize=512M,mem_limit=16M,backing_dev=back/spill,backing_size=512M f=file,path=back/f.img --ublk >out 2>err & server=$!
freestone wait --timeout 2m || wrong "no server"
dd if=/dev/urandom of=noise bs=1M count=4 status=none
for name in r f; do mkfs.ext4 -q "$(disk_of $name)"; mount -t ext4 "$(disk_of $name)" $name; done

stalls=$(counted allocstall); scanned=$(counted pgscan_direct); stolen=$(counted pgsteal)
MIB=240
fill() { # directory: large files, and many small ones, whose inodes are reclaimed as well
  for n in $(seq $((MIB / 4))); do
    cat noise >$1/large$n
    mkdir $1/small$n; for m in $(seq 20); do echo "$n $m" >$1/small$n/$m; done; done; }
fill r & one=$!
fill f & other=$!
while kill -0 $one 2>/dev/null || kill -0 $other 2>/dev/null; do all_flush; sleep 5; done
wait $one || wrong "the RAM disk cannot be filled"; wait $other || wrong "the file cannot be filled"
sync r f
grep MemTotal /proc/meminfo
echo "     $MIB MiB each; reclaimed $(($(counted pgsteal) - stolen)) pages, allocations that had to reclaim:" \
  "$(($(counted allocstall) - stalls)), of $(($(counted pgscan_direct) - scanned)) pages"
[ $(($(counted pgsteal) - stolen)) -gt 20000 ] || wrong "memory was never low"
[ $(($(counted allocstall) - stalls)) -gt 0 ] || wrong "no task had to reclaim memory"
echo "ok   two file systems are filled, and all threads are I/O flushers: $(ls /proc/$server/task | wc -l)"

echo 3 >/proc/sys/vm/drop_caches
for name in r f; do
  for n in $(seq $((MIB / 4))); do
    cmp noise $name/large$n || wrong "$name/large$n"
    [ "$(cat $name/small$n/7)" = "$n 7" ] || wrong "$name/small$n"; done; done
[ "$(freestone stat r --json | grep -o '"used_bytes": *[0-9]*' | grep -o '[0-9]*$')" -gt 200000000 ] || wrong "no pages were written to the backing device"
for name in r f; do umount $name; e2fsck -fn "$(disk_of $name)" >said 2>&1 || wrong "e2fsck: $(cat said)"; done
echo "ok   all content is correct, including pages on the backing device"
kill -TERM $server; wait $server || wrong "the server ends with $?"
umount back
dmesg | grep -i 'hung task\|blocked for more\|BUG:\|WARNING:\|Out of memory' && wrong "the kernel's log" || true
echo "ok   no task hung or was killed"
