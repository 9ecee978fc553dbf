#!/bin/bash
# 04-ci-template.sh - CI engineer: a template gives each connection its own mounted disk; no fork is left when the connection ends, in an
# orderly way or by SIGKILL.
. "$(dirname "$0")/lib.sh"
BY=hand # connections of a client: nbdfuse or the kernel's NBD client
[ $VIA != ublk ] || VIA=nbdfuse
mkdir sources; echo image >sources/file
image golden.img 128M sources
forks() { freestone list --json | grep -c '"kind": "fork"' || true; }
has_forks() { [ "$(forks)" = "$1" ]; }

serve golden=file,path=golden.img,readonly=yes,mem_limit=512M,publish=no
run freestone fork golden ci --template --nbd "unix:$dir/nbd.sock" >/dev/null
attach ci work-0 '' first
attach ci work-1 '' second
is "disks of two connections" 2 "$(forks)"
echo first >>work-0/file; sync -f work-0
is "the first job" "image first" "$(echo $(cat work-0/file))"
is "the second job" "image" "$(cat work-1/file)"
detach work-0
soon has_forks 1
if [ $VIA = nbdfuse ]; then kill -9 "${nbdfuse_pid[second]}"; else nbd-client -d "${disk_of[second]}" >/dev/null; fi
soon has_forks 0
detach work-1
attach ci work-0 '' third
is "the third job" "image" "$(cat work-0/file)"
detach work-0
soon has_forks 0
stop_server
