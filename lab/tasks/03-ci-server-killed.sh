#!/bin/bash
# 03-ci-server-killed.sh - CI engineer: the server is killed with SIGKILL under a job that writes to its mounted disk, and the job
# after it; the mount is cleaned up, and the next server with the same state has the disk again with the content of the image.
. "$(dirname "$0")/lib.sh"
mkdir sources; echo image >sources/file
image golden.img 128M sources
found() { (cd work && echo "$(echo *): $(cat file)"); }

serve --state "$dir/state" golden=file,path=golden.img,readonly=yes,mem_limit=512M,publish=no
run freestone fork golden job on_data_loss=empty --nbd "unix:$dir/nbd.sock" >/dev/null
attach job work
setsid bash -c 'cd work && while head -c 256K /dev/urandom >>big && echo line >>file; do :; done' 2>/dev/null & job=$!
soon test -s work/big; sleep 0.3
kill_server
kill -9 -- "-$job"; wait $job 2>/dev/null || true
clean_up work
fails mountpoint -q work
if [ $VIA = ublk ]; then serve --state "$dir/state" --ublk; else serve --state "$dir/state"; fi
attach job work
is "what the next job finds" "file lost+found: image" "$(found)"
echo again >>work/file; sync -f work
detach work
run freestone remove job >/dev/null || wrong "the disk is in use"
stop_server
