#!/bin/bash
# 05-ci-nightly-image.sh - CI engineer: an image is pushed to object storage every night; jobs of another server get mounted disks of the
# newest one, a job that began before keeps the old one, and old images are pruned.
. "$(dirname "$0")/lib.sh"
mkdir sources; echo "night 1" >sources/night; head -c 8M /dev/urandom >sources/toolchain
wanted=$(sha256sum <sources/toolchain)
store=file://$dir/store
newest() { freestone images "$store" --json | tr -d ' \n' | grep -o '"tag":"[^"]*"' | cut -d'"' -f4 | sort | tail -n 1; }

image golden.img 256M sources
run freestone push golden=file,path=golden.img,readonly=yes "$store:nightly-1" >push.out
serve "golden-1=image,url=$store:nightly-1,mem_limit=512M,publish=no"
run freestone fork golden-1 job-1 --nbd "unix:$dir/nbd.sock" >/dev/null
attach job-1 work-1
is "the image" "night 1 $wanted" "$(cat work-1/night) $(sha256sum <work-1/toolchain)"

for night in 2 3; do
  echo "night $night" >sources/night
  debugfs -w -R 'rm night' golden.img >/dev/null 2>&1; debugfs -w -R 'write sources/night night' golden.img >/dev/null 2>&1
  run freestone push golden=file,path=golden.img,readonly=yes "$store:nightly-$night" >push.out
  sent=$(grep -o '[0-9.]*[BKM] sent' push.out)
  case $sent in *M*) wrong "night $night sends unchanged data: $sent";; esac
done
is "the newest image" nightly-3 "$(newest)"
run freestone create "golden-3=image,url=$store:nightly-3,mem_limit=512M,publish=no" >/dev/null
run freestone fork golden-3 job-2 --nbd "unix:$dir/nbd.sock" >/dev/null
attach job-2 work-2
is "the image of the new job" "night 3 $wanted" "$(cat work-2/night) $(sha256sum <work-2/toolchain)"
is "the image of the old job" "night 1" "$(cat work-1/night)"
detach work-1
run freestone remove job-1 >/dev/null
run freestone remove golden-1 >/dev/null
run freestone prune "$store" --tags 'nightly-*' --keep-last 2 >prune.out
is "tags that are left" "nightly-2 nightly-3" "$(echo $(freestone images "$store" | grep -o '^nightly-[0-9]*'))"
is "the image after the prune" "$wanted" "$(sha256sum <work-2/toolchain)"
detach work-2
stop_server
