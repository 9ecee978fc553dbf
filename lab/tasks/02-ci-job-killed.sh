#!/bin/bash
# 02-ci-job-killed.sh - CI engineer: a job that writes to its mounted disk is killed with SIGKILL, alone and with everything that holds its
# disk; the disk is rewound for the next job, which finds no data of the killed job.
. "$(dirname "$0")/lib.sh"
mkdir sources; echo image >sources/file
image golden.img 128M sources
found() { (cd work && echo "$(echo *): $(cat file)"); }
job() { # writes continuously, in its own process group
  setsid bash -c 'cd "$1" && while head -c 256K /dev/urandom >>big && echo line >>file; do :; done' job "$1" 2>/dev/null & job=$!
  soon test -s "$1/big"; sleep 0.3; }
nbdfuses() { pgrep -f "nbdfuse .*$dir" || true; }

serve golden=file,path=golden.img,readonly=yes,mem_limit=512M,publish=no
run freestone fork golden job --nbd "unix:$dir/nbd.sock" >/dev/null
attach job work
job work; kill -9 -- "-$job"; wait "$job" 2>/dev/null || true
[ -s work/big ] || wrong "the killed job has written nothing"
rewind job work
is "what the next job finds" "file lost+found: image" "$(found)"

# The runner kills all processes of the job, including those between server and mount.
job work; kill -9 -- "-$job"; wait "$job" 2>/dev/null || true
no_nbdfuse() { [ -z "$(nbdfuses)" ]; }
if [ $VIA = nbdfuse ]; then kill -9 $(nbdfuses); soon no_nbdfuse; fi
clean_up work
run freestone rewind job --force >/dev/null
attach job work
is "what the next job finds" "file lost+found: image" "$(found)"
detach work
run freestone remove job >/dev/null || wrong "the disk is in use"
stop_server
