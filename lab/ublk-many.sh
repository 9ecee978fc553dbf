#!/bin/sh
# ublk-many.sh - runs in the kernel lab (see run-ublk.sh): a hundred forks of one disk as block devices, and the memory and threads of each.
# Ends at the first failure.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run
COUNT=100
# Some drivers also count devices of root.
modprobe ublk_drv ublks_max=$((COUNT + 8))
mkdir -p /tmp/lab; cd /tmp/lab
wrong() { echo "FAIL $1"; cat err; exit 1; }
of_server() { awk -v key="$1:" '$1 == key { print $2 }' /proc/$server/status; }
# Without the kernel's io_uring workers: Linux 6.12 keeps one per device.
threads_of_server() { cat /proc/$server/task/*/comm | grep -vc '^iou-wrk-'; }
now() { cut -d' ' -f1 /proc/uptime; }
of_machine() { awk '/^MemAvailable/ { print $2 }' /proc/meminfo; }

freestone serve r=ram,disksize=64M,publish=no >out 2>err & server=$!; freestone wait --timeout 2m || wrong "no server"
freestone snapshot r base >/dev/null
freestone fork base job-%n --count $COUNT >/dev/null
rss=$(of_server RssAnon) size=$(of_server VmSize) threads=$(threads_of_server) free=$(of_machine) began=$(now)
for n in $(seq 0 $((COUNT - 1))); do freestone publish job-$n --ublk --queues 1 >>disks || wrong "publish job-$n"; done
seconds=$(echo "$(now) $began" | awk '{ print $1 - $2 }')
each() { echo $((($1 - $2) / COUNT)); }
rss=$(each $(of_server RssAnon) $rss) size=$(each $(of_server VmSize) $size) threads=$(each $(threads_of_server) $threads)
echo "     each block device: memory of the server $rss KiB, addresses $size KiB, threads $threads; of the machine" \
  "$(each $free $(of_machine)) KiB; all are there in $seconds s"
[ "$(sort -u disks | wc -l)" = $COUNT ] || wrong "not $COUNT block devices"
[ $threads = 2 ] && [ $rss -lt 256 ] || wrong "a block device needs too many threads or too much memory"
dd if=/dev/urandom of="$(tail -n 1 disks)" bs=1M count=8 oflag=direct status=none
kill -TERM $server; wait $server || wrong "the server ends with $?"
[ -z "$(ls /dev | grep 'ublk[bc][0-9]')" ] || wrong "block devices are left"
echo "ok   $COUNT block devices come and go"
