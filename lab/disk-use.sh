# disk-use.sh - sourced by scripts of the kernel lab: operations on a disk of any transport (see ublk-use.sh and vhost-user.sh). The caller
# defines `wrong`, which prints a message and ends the script.

mkfs_of() { # file system, disk
  case $1 in
    ext4) mkfs.ext4 -q -F "$2";;
    xfs) mkfs.xfs -q -f "$2";;
    btrfs) mkfs.btrfs -q -f "$2";;
    f2fs) mkfs.f2fs -q -f "$2";; esac; }
fsck_of() {
  case $1 in
    ext4) e2fsck -fn "$2";;
    xfs) xfs_repair -n "$2";;
    btrfs) btrfs check "$2";;
    f2fs) fsck.f2fs --dry-run "$2";; esac; }

# Makes a file system, fills it completely, frees a part, mounts it again and verifies its content.
file_system() { # file system, disk, directory, MiB of files
  kind=$1 disk=$2 at=$3 mib=$4
  mkfs_of $kind $disk >said 2>&1 || wrong "$kind: mkfs: $(cat said)"
  mkdir -p $at; mount -t $kind $disk $at || wrong "$kind: mount"
  mkdir $at/small
  for n in $(seq 300); do echo "$kind $n" >$at/small/$n; done
  for n in $(seq $((mib / 8))); do dd if=/dev/urandom of=$at/large$n bs=1M count=8 status=none; done
  (cd $at && md5sum large* small/*) >sums
  dd if=/dev/zero of=$at/full bs=1M status=none 2>said && wrong "$kind: writes beyond its size succeed"
  grep -q "No space left" said || wrong "$kind: not full, but $(cat said)"
  sync $at 2>/dev/null || true
  rm $at/full $at/large1; umount $at || wrong "$kind: umount"
  fsck_of $kind $disk >said 2>&1 || wrong "$kind: fsck: $(cat said)"
  mount -t $kind $disk $at || wrong "$kind: cannot be mounted again"
  grep -v large1\$ sums >sums.wanted
  (cd $at && md5sum -c --status) <sums.wanted || wrong "$kind: the content differs"
  [ "$(ls $at/small | wc -l)" = 300 ] || wrong "$kind: files are missing"
  umount $at
  echo "ok   $kind is made, filled, checked, mounted again"; }

# Runs four fio jobs that verify their writes, on all queues at the same time.
verified() { # disk, MiB, words for fio
  disk=$1 mib=$2; shift 2
  fio --name=v --filename=$disk --rw=randrw --rwmixread=30 --bsrange=4k-256k --direct=1 --ioengine=io_uring --iodepth=16 --numjobs=4 \
    --size=$((mib / 4))m --offset_increment=$((mib / 4))m --verify=crc32c --verify_fatal=1 --verify_backlog=128 --group_reporting \
    "$@" >said 2>&1 || wrong "fio: $(tail -n 20 said)"
  echo "ok   fio verifies, 4 jobs of $((mib / 4)) MiB $*"; }

# Tests `freestone mount`: resets, a refused reset of a disk in use, and unmounting after the server was killed.
mounts() { # way to attach
  via=$1; export FREESTONE_CONTROL=/run/mounts.ctl
  mkdir -p tree at; dd if=/dev/urandom of=tree/base bs=1M count=4 status=none; sum=$(md5sum <tree/base)
  rm -f golden; dd if=/dev/zero of=golden bs=1M count=0 seek=64 status=none
  mkfs.ext4 -q -F -d tree golden >said 2>&1 || wrong "mkfs: $(cat said)"
  begin() {
    freestone serve golden=file,path=golden,readonly=yes,publish=no --control $FREESTONE_CONTROL --nbd unix:/run/mounts.nbd >out 2>>err & server=$!
    freestone wait --timeout 2m || wrong "no server"
    freestone fork golden job >/dev/null
    freestone mount job at --via $via >said 2>&1 || wrong "mount by $via: $(cat said)"
    [ "$(md5sum <at/base)" = "$sum" ] || wrong "$via: the content differs"; }
  begin
  start=$(cut -d' ' -f1 /proc/uptime)
  for n in $(seq 10); do
    dd if=/dev/urandom of=at/own bs=64k count=4 status=none; dd if=/dev/zero of=at/base bs=1M count=1 conv=notrunc status=none
    freestone reset job >said 2>&1 || wrong "reset: $(cat said)"
    [ "$(md5sum <at/base)" = "$sum" ] || wrong "$via: a reset leaves old blocks"
    [ ! -e at/own ] || wrong "$via: a reset leaves files"; done
  took=$(echo "$start $(cut -d' ' -f1 /proc/uptime)" | awk '{ printf "%d", ($2 - $1) * 100 }')
  (cd at && exec sleep 1000) & holder=$!
  echo own >at/own; sync
  freestone reset job >said 2>&1 && wrong "$via: a reset succeeds while the disk is in use"
  grep -q "in use by sleep (pid $holder" said || wrong "$via: $(cat said)"
  [ -e at/own ] || wrong "$via: a refused reset changes the disk"
  kill $holder; wait $holder 2>/dev/null || true
  freestone snapshot job job-1 >/dev/null; freestone rewind job --to job-1 >said 2>&1 || wrong "$via: $(cat said)"
  [ -e at/own ] || wrong "$via: the snapshot lacks a file"
  freestone umount job >said 2>&1 || wrong "$via: $(cat said)"
  freestone list | grep -q '^job .* -$' || wrong "$via: the disk is still published: $(freestone list)"
  kill -9 $server; wait $server 2>/dev/null || true
  begin
  echo lost >at/own
  kill -9 $server; wait $server 2>/dev/null || true; server=
  freestone umount job >said 2>&1 || wrong "$via: umount after a kill: $(cat said)"
  ! grep -q /tmp/lab/at /proc/mounts || wrong "$via: the disk is still mounted"
  [ "$(ls /run/freestone-mounts | wc -l)" = 0 ] || wrong "$via: $(ls /run/freestone-mounts) is left"
  begin; freestone umount job; kill -TERM $server; wait $server || wrong "the server ends with $?"
  echo "ok   freestone mount by $via: resets (each with its writes in $took ms), refusals, kills"; }
