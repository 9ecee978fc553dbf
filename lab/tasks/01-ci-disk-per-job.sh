#!/bin/bash
# 01-ci-disk-per-job.sh - CI engineer: each of two jobs has a mounted disk with the files of one image, at the same time; a disk is rewound
# between jobs, and the next job finds the image.
. "$(dirname "$0")/lib.sh"
mkdir sources; seq 20000 >sources/numbers; wanted=$(sha256sum <sources/numbers)
image golden.img 256M sources

serve golden=file,path=golden.img,readonly=yes,mem_limit=512M,publish=no
run freestone fork golden job-%n --count 2 --nbd "unix:$dir/nbd.sock" >/dev/null
attach job-0 work-0
attach job-1 work-1
for job in 1 2 3; do
  is "what job $job finds" "lost+found numbers" "$(cd work-0 && echo *)"
  is "the image of job $job" "$wanted" "$(sha256sum <work-0/numbers)"
  head -c 8M /dev/urandom >work-0/built; seq 5 >work-0/numbers; echo "job $job" >>work-1/log
  rewind job-0 work-0
done
is "what the other job wrote" "job 1 job 2 job 3" "$(tr "\n" " " <work-1/log | sed "s| $||")"
is "what the last reset left" "$wanted" "$(sha256sum <work-0/numbers)"
detach work-0
detach work-1
run freestone remove 'job-*' >/dev/null || wrong "the disks are in use"
is "the image" "$wanted" "$(debugfs -R 'cat numbers' golden.img 2>/dev/null | sha256sum)"
stop_server
