#!/bin/bash
# 13-admin-tmp.sh - administrator: a compressed disk for temporary files with a memory limit and a backing file; removed files free memory, and
# metrics show how full it is. (lab/run-systemd.sh tests boot and shutdown.)
. "$(dirname "$0")/lib.sh"
metric() { # NAME: its value
  local port line; port=$(freestone stat --json | grep -o '127.0.0.1:[0-9]*' | head -n 1 | cut -d: -f2)
  exec 9<>"/dev/tcp/127.0.0.1/$port"; printf 'GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&9
  tr -d '\r' <&9 | sed -n "s/^$1{[^}]*} \([0-9]*\).*/\1/p" | head -n 1; exec 9>&-; }
stored_below() { [ "$(counter tmp orig_data_size)" -lt "$1" ]; }

serve "tmp=ram,disksize=256M,mem_limit=16M,backing_dev=$dir/spill,backing_size=128M" --metrics 0
format tmp
attach tmp work discard
seq 4000000 >work/numbers; sync -f work
data=$(counter tmp orig_data_size) stored=$(counter tmp compr_data_size)
[ "$data" -gt 25000000 ] && [ "$stored" -lt $((data * 3 / 4)) ] || wrong "data is not compressed: $data bytes in $stored"
head -c 48M /dev/urandom >work/noise; sync -f work
sum=$(sha256sum <work/noise)
[ "$(metric freestone_family_memory_bytes)" -le $((17 << 20)) ] || wrong "memory: $(metric freestone_family_memory_bytes)"
used=$(metric freestone_family_backing_used_bytes) size=$(metric freestone_family_backing_size_bytes)
[ "$used" -gt $((24 << 20)) ] && [ "$size" = $((128 << 20)) ] || wrong "backing device: $used of $size bytes"
echo 3 >/proc/sys/vm/drop_caches
is "data on the backing device" "$sum" "$(sha256sum <work/noise)"
rm work/noise work/numbers; sync -f work; fstrim work 2>/dev/null || true
soon stored_below $((8 << 20))
soon test "$(metric freestone_family_backing_used_bytes)" -lt "$used"
detach work
stop_server
