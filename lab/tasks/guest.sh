#!/bin/bash
# guest.sh BY [TASK...] - runs tasks in the kernel lab (see run-tasks.sh) with ublk, the kernel's NBD client and nbdfuse.
set -euo pipefail
by=$1; shift
for module in crc32c_generic crc32_generic ext4 btrfs loop fuse; do modprobe $module 2>/dev/null || true; done
modprobe nbd nbds_max=8 max_part=0
modprobe ublk_drv
failed=0
for via in ublk nbd nbdfuse; do
  tasks="$*"
  # A ublk device survives a power cut, so power cuts need another transport. Tasks with nbdfuse run outside the lab.
  [ -n "$tasks" ] || case $via in
    ublk) tasks="detach-orders 01-ci-disk-per-job 02-ci-job-killed 03-ci-server-killed 10-fs-faults 11-fs-zoned 12-fs-full-and-slow
      14-admin-keep-and-upgrade";;
    nbd) tasks="detach-orders 01-ci-disk-per-job 02-ci-job-killed 03-ci-server-killed 04-ci-template 09-fs-power-cuts 10-fs-faults
      12-fs-full-and-slow 14-admin-keep-and-upgrade";;
    nbdfuse) tasks=detach-orders;;
  esac
  for task in $tasks; do
    BY=$by VIA=$via timeout 120 "/lab/tasks/$task.sh" | sed "s/^/$via  /" || failed=1
  done
done
exit $failed
