#!/bin/sh
# vhost-user.sh - runs in the kernel lab (see run-vhost-user.sh): the guest's part of each test.
set -eu
fill() { # directory files: each of its own content, with sums
  for n in $(seq "$2"); do
    yes "file $n of $1" | head -c 1048576 >"$1/file$n"
    dd if=/dev/urandom of="$1/random$n" bs=64k count=16 conv=fsync status=none
  done
  (cd "$1" && md5sum file* random* >/tmp/sums-"$(basename "$1")")
}
case $1 in
  boot)
    mount -t ext4 /dev/vda /mnt
    chroot /mnt /bin/busybox sh /bin/start
    umount /mnt;;
  use)
    [ "$(ls -d /sys/block/vda/mq/* | wc -l)" = 2 ] || { echo "use: not two queues"; exit 1; }
    before=$(blockdev --getsz /dev/vda)
    for d in vda vdb; do mkdir -p /tmp/$d; mke2fs -q -t ext4 /dev/$d; mount -t ext4 -o discard /dev/$d /tmp/$d; done
    fill /tmp/vda 20 & a=$!
    fill /tmp/vdb 20 & b=$!
    wait $a; wait $b
    for _ in $(seq 300); do [ "$(blockdev --getsz /dev/vda)" -gt "$before" ] && break; sleep 0.1; done
    [ "$(blockdev --getsz /dev/vda)" = $((2 * before)) ] || { echo "use: the guest does not see that its disk has grown"; exit 1; }
    resize2fs /dev/vda 2>/dev/null >/dev/null
    for d in vda vdb; do
      umount /tmp/$d; e2fsck -fn /dev/$d >/dev/null 2>&1 || { echo "use: e2fsck $d"; exit 1; }
      mount -t ext4 /dev/$d /tmp/$d; (cd /tmp/$d && md5sum -c --status /tmp/sums-$d) || { echo "use: $d has different content"; exit 1; }
      umount /tmp/$d; blkdiscard /dev/$d
      dd if=/dev/$d bs=1M count=64 status=none | cmp -s -n 67108864 - /dev/zero || { echo "use: $d is not empty after a discard"; exit 1; }
    done
    echo "use: ext4 on two disks of two queues, filled, grown, checked, discarded";;
  killed|cut)
    # Each block contains the number of its round. Completed direct writes must be present.
    before=$(blockdev --getsz /dev/vda)
    mkdir -p /tmp/vda; mke2fs -q -t ext4 /dev/vda; mount -t ext4 /dev/vda /tmp/vda
    for round in 1 2 3 4 5 6; do
      yes "round $round" | head -c 8388608 >/tmp/wanted
      dd if=/tmp/wanted of=/tmp/vda/file bs=4k oflag=direct conv=notrunc status=none
      fill /tmp/vda 4
      dd if=/tmp/vda/file bs=4k iflag=direct status=none | cmp -s - /tmp/wanted || { echo "$1: round $round has different content"; exit 1; }
      (cd /tmp/vda && md5sum -c --status /tmp/sums-vda) || { echo "$1: round $round: sums"; exit 1; }
    done
    umount /tmp/vda; e2fsck -fn /dev/vda >/dev/null 2>&1 || { echo "$1: e2fsck"; exit 1; }
    case $1 in
      killed) echo "killed: six rounds of writes are there";;
      cut)
        [ "$(blockdev --getsz /dev/vda)" = $((2 * before)) ] || { echo "cut: the guest does not see that its disk has grown"; exit 1; }
        echo "cut: six rounds of writes are there, on a disk that has grown";; esac;;
  files)
    wrong() { echo "files: $1"; exit 1; }
    for module in crc32c_generic crc32_generic ext4 xfs btrfs f2fs; do modprobe $module 2>/dev/null || true; done
    . /lab/disk-use.sh; cd /tmp
    for kind in ext4 xfs btrfs f2fs; do file_system $kind /dev/vda /tmp/at 64; done
    verified /dev/vda 128
    echo "files: file systems and a verifying client";;
esac
