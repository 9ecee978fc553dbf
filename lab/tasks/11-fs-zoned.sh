#!/bin/bash
# 11-fs-zoned.sh - file-system developer: a zoned disk. As a block device it holds a btrfs; for a client without zones it is a disk that accepts
# writes at the write pointers only.
. "$(dirname "$0")/lib.sh"
pointer() { freestone zones z report --count 1 | grep -o 'wptr 0x[0-9a-f]*'; }
if [ $VIA = ublk ]; then
  serve z=null,size=512M,memory_backed=1,zoned=1,zone_size=8M,zone_max_open=8 --ublk
  disk=$(grep -o '/dev/ublkb[0-9]*' server.out)
  run mkfs.btrfs -q -O zoned -d single -m single "$disk" >mkfs.out 2>&1 || wrong "mkfs.btrfs: $(cat mkfs.out)"
  mkdir work; run mount -t btrfs "$disk" work
  head -c 16M /dev/urandom >work/file; sync -f work; sum=$(sha256sum <work/file)
  run umount work; run mount -t btrfs "$disk" work
  is "the file" "$sum" "$(sha256sum <work/file)"
  run umount work
  [ "$(freestone zones z report | grep -c 'wptr 0x000000')" -lt 64 ] || wrong "no zone is written"
else
  VIA=nbdfuse
  serve z=null,size=64M,memory_backed=1,zoned=1,zone_size=8M
  plug z
  head -c 8M /dev/urandom >zone
  run dd if=zone of="${disk_of[z]}" bs=64k conv=notrunc status=none || wrong "a write at the start of a zone fails"
  is "what is read" "$(sha256sum <zone)" "$(head -c 8M "${disk_of[z]}" | sha256sum)"
  # A write that is not at the write pointer fails.
  fails dd if=zone of="${disk_of[z]}" bs=64k count=1 seek=129 conv=notrunc,fsync
  fails dd if=zone of="${disk_of[z]}" bs=64k count=1 conv=notrunc,fsync
  is "the write pointer" "wptr 0x004000" "$(pointer)"
  run freestone zones z reset --offset 0 --count 1 >/dev/null
  is "the write pointer after a reset" "wptr 0x000000" "$(pointer)"
  run dd if=zone of="${disk_of[z]}" bs=64k count=1 conv=notrunc,fsync status=none || wrong "a write to a reset zone fails"
  unplug z
fi
stop_server
