#!/bin/bash
# 12-fs-full-and-slow.sh - file-system developer: a thin disk that fills up under a file system, which fails or waits for space; and a slow disk.
. "$(dirname "$0")/lib.sh"
image golden.img 128M
waits() { [ "$(counter waiting-disk waiting)" -gt 0 ]; }

serve golden=file,path=golden.img,readonly=yes,mem_limit=64M,publish=no \
  failing=fork,base=golden,mem_limit=8M waiting-disk=fork,base=golden,mem_limit=8M,full=wait slow=fork,base=golden,mem_limit=32M
attach failing full errors=remount-ro
head -c 24M /dev/urandom >noise
fails dd if=noise of=full/file bs=1M conv=fsync
grep -q 'No space left\|Input/output error' failed.out || wrong "unexpected error of the writer: $(cat failed.out)"
detach full
run freestone rewind failing --force >/dev/null

attach waiting-disk full
dd if=noise of=full/file bs=1M conv=fsync status=none & writer=$!
soon waits
kill -0 $writer || wrong "the writer does not wait"
run freestone set waiting-disk mem_limit=40M >/dev/null
wait $writer || wrong "the writer fails although space was freed"
is "the file" "$(sha256sum <noise)" "$(sha256sum <full/file)"
detach full

run freestone set slow bps=8M bps_burst=1M >/dev/null
attach slow work
start_us=$(us); head -c 8M noise | dd of=work/file bs=1M conv=fsync status=none; took=$(($(us) - start_us))
[ $took -gt 700000 ] || wrong "8 MiB at 8 MiB/s take $took us"
run freestone set slow bps=none >/dev/null
is "the file on the slow disk" "$(head -c 8M noise | sha256sum)" "$(sha256sum <work/file)"
detach work
stop_server
