#!/bin/bash
# 15-admin-move.sh - administrator: a mounted disk moves to another machine (another server), by a saved file and by object storage.
. "$(dirname "$0")/lib.sh"
mkdir sources; echo image >sources/file
image golden.img 128M sources
here=$dir/control there=$dir/there-control

serve --state "$dir/state" golden=file,path=golden.img,readonly=yes,mem_limit=128M,publish=no
run freestone fork golden job --nbd "unix:$dir/nbd.sock" >/dev/null
attach job work
echo changed >>work/file; head -c 2M /dev/urandom >work/data; sum=$(sha256sum <work/data)
detach work
run freestone unpublish job >/dev/null
run freestone save job job.saved >/dev/null
run freestone push golden=file,path=golden.img,readonly=yes "file://$dir/store:golden" >/dev/null
run freestone remove job >/dev/null
stop_server

export FREESTONE_CONTROL=$there
serve --state "$dir/there" image=file,path=golden.img,readonly=yes,mem_limit=128M,publish=no
run freestone restore job.saved keep=yes >/dev/null
run freestone publish job --nbd "unix:$dir/nbd.sock" >/dev/null
attach job work
is "the disk that was moved" "image changed $sum" "$(echo $(cat work/file)) $(sha256sum <work/data)"
detach work
run freestone push job "file://$dir/store:job" >/dev/null
stop_server

# A third machine has access to the store only.
export FREESTONE_CONTROL=$here
serve "moved=image,url=file://$dir/store:job,mem_limit=128M,publish=no"
run freestone fork moved job --nbd "unix:$dir/nbd.sock" >/dev/null
attach job work
is "the disk that was pushed" "image changed $sum" "$(echo $(cat work/file)) $(sha256sum <work/data)"
detach work
stop_server
