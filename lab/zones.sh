#!/bin/sh
# zones.sh - runs in the kernel lab (see run-zones.sh): runs /script on the kernel's null_blk and writes the results to the disk, with their
# length first. Messages of modules go to the log.
set -eu
for module in configfs null_blk nvmet nvme_loop; do
  case $module in null_blk) modprobe null_blk nr_devices=0;; *) modprobe $module;; esac; done
read -r began _ </proc/uptime
zone_guest </script >/tmp/answers
read -r ended _ </proc/uptime
printf '%-16s' $(stat -c %s /tmp/answers) | cat - /tmp/answers | dd of=/dev/vda bs=64k conv=notrunc,fsync status=none
echo "null_blk: $(grep -c '^>' /tmp/answers) lines of the script in $(echo "$ended $began" | awk '{print $1 - $2}') s"
