# disk-use.sh - sourced in the kernel lab: what is done with a disk, whoever brings it (see ublk-use.sh and vhost-user.sh). `wrong` is the
# caller's: it says what went wrong and ends.

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

# Makes it, fills it to the brim, frees a part, and looks whether all is there after it was mounted again.
file_system() { # file system, disk, directory, MiB of files
  kind=$1 disk=$2 at=$3 mib=$4
  mkfs_of $kind $disk >said 2>&1 || wrong "$kind: mkfs: $(cat said)"
  mkdir -p $at; mount -t $kind $disk $at || wrong "$kind: mount"
  mkdir $at/small
  for n in $(seq 300); do echo "$kind $n" >$at/small/$n; done
  for n in $(seq $((mib / 8))); do dd if=/dev/urandom of=$at/large$n bs=1M count=8 status=none; done
  (cd $at && md5sum large* small/*) >sums
  dd if=/dev/zero of=$at/full bs=1M status=none 2>said && wrong "$kind: it has no end"
  grep -q "No space left" said || wrong "$kind: not full, but $(cat said)"
  sync $at 2>/dev/null || true
  rm $at/full $at/large1; umount $at || wrong "$kind: umount"
  fsck_of $kind $disk >said 2>&1 || wrong "$kind: fsck: $(cat said)"
  mount -t $kind $disk $at || wrong "$kind: it cannot be mounted again"
  grep -v large1\$ sums >sums.wanted
  (cd $at && md5sum -c --status) <sums.wanted || wrong "$kind: another content"
  [ "$(ls $at/small | wc -l)" = 300 ] || wrong "$kind: files are missing"
  umount $at
  echo "ok   $kind is made, filled, checked, mounted again"; }

# Jobs that verify what they wrote, over all queues at once.
verified() { # disk, MiB, words for fio
  disk=$1 mib=$2; shift 2
  fio --name=v --filename=$disk --rw=randrw --rwmixread=30 --bsrange=4k-256k --direct=1 --ioengine=io_uring --iodepth=16 --numjobs=4 \
    --size=$((mib / 4))m --offset_increment=$((mib / 4))m --verify=crc32c --verify_fatal=1 --verify_backlog=128 --group_reporting \
    "$@" >said 2>&1 || wrong "fio: $(tail -n 20 said)"
  echo "ok   fio verifies, 4 jobs of $((mib / 4)) MiB $*"; }
