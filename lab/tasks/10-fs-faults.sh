#!/bin/bash
# 10-fs-faults.sh - file-system developer: reads and writes of a mounted disk fail; a read error reaches the program, a failed journal makes
# ext4 read-only (errors=remount-ro), and after e2fsck the file system is usable again.
. "$(dirname "$0")/lib.sh"
image golden.img 64M
# ext4 detects a failed journal at the next operation.
read_only() { ! mkdir work/probe 2>mkdir.out || { rmdir work/probe; return 1; }; grep -q 'Read-only file system' mkdir.out; }

serve golden=file,path=golden.img,readonly=yes,publish=no t=fork,base=golden,faults=none,seed=1
attach t work errors=remount-ro
head -c 4M /dev/urandom >work/file; sync -f work
sum=$(sha256sum <work/file)
detach work
plug t
run debugfs -R 'blocks file' "${disk_of[t]}" >blocks
block_size=$(dumpe2fs -h "${disk_of[t]}" 2>/dev/null | sed -n 's/^Block size: *//p')
unplug t
middle=$(($(cut -d' ' -f100 blocks) * block_size))
attach t work errors=remount-ro
run freestone set t faults="read error=EIO at=${middle}B+4K" >/dev/null
fails cat work/file
run freestone set t faults=none >/dev/null
is "the file after the read errors" "$sum" "$(sha256sum <work/file)"
! read_only || wrong "a read error makes the file system read-only"

run freestone set t faults='writes error=EIO' >/dev/null
mkdir work/directory || true
fails sync work/directory
soon read_only
fails touch work/other
fired=$(counter t fired)
[ "${fired:-0}" -gt 0 ] || wrong "no rule fired"
run freestone set t faults=none >/dev/null
detach work
plug t
status=0; run e2fsck -fy "${disk_of[t]}" >fsck.out 2>&1 || status=$?
[ $status -le 1 ] || wrong "e2fsck ends with $status: $(cat fsck.out)"
unplug t
attach t work errors=remount-ro
is "the file after e2fsck" "$sum" "$(sha256sum <work/file)"
touch work/other
detach work
stop_server
