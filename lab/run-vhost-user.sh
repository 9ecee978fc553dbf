#!/bin/bash
# run-vhost-user.sh [PART...] - tests disks in a virtual machine, with QEMU's vhost-user-blk and a stock kernel's virtio_blk:
#   boot     a root file system on a fork: the guest writes to it, and after `freestone rewind` the next boot finds the base
#   use      ext4 on two disks with two queues each: filled while one of them grows, read back, checked, trimmed
#   killed   the server is killed with SIGKILL under a write load and restarted: no data is lost, nothing hangs
#   adopted  the same with a RAM disk, which the next server adopts (--recoverable)
#   cut      the connection is cut repeatedly under a write load, and the disk grows: no data is lost, nothing hangs
#   files    ext4, xfs, btrfs and f2fs are filled and checked, and fio verifies with 4 jobs on 2 queues
# Runs all parts by default. FREESTONE names the program; by default it is built.
set -eu
cd "$(dirname "$0")/.."
only=" ${*:-boot use killed adopted cut files} "
dir=$(mktemp -d)
server=
end() { [ -z "$server" ] || kill -9 "$server" 2>/dev/null || true; rm -rf "$dir"; }
trap end EXIT
if [ -z "${FREESTONE:-}" ]; then
  cargo build --quiet --package freestone-cli
  FREESTONE=${CARGO_TARGET_DIR:-target}/debug/freestone
fi
FREESTONE=$(realpath "$FREESTONE")
export FREESTONE_CONTROL=$dir/control

serve() { # devices...
  "$FREESTONE" serve "$@" --nbd "unix:$dir/nbd" --control "$dir/control" >"$dir/said" 2>>"$dir/log" &
  server=$!
  "$FREESTONE" wait
}
stop() { kill "$server"; wait "$server" || { echo "the server ended with $?" >&2; cat "$dir/log" >&2; exit 1; }; server=; }
# Starts a guest with shared memory and one disk per socket.
modules=virtio_blk flavour=cloud tools=
guest() { # seconds script-arguments -- sockets...
  seconds=$1; shift
  arguments=(); while [ "$1" != -- ]; do arguments+=("$1"); shift; done; shift
  q="-object memory-backend-memfd,id=m,size=512M,share=on -machine memory-backend=m"
  n=0; for socket in "$@"; do
    q="$q -chardev socket,id=c$n,path=$socket,reconnect-ms=200 -device vhost-user-blk-pci,chardev=c$n,num-queues=2"; n=$((n+1)); done
  lab/kernel-lab.sh -k "${KERNEL:-6.12}" -f $flavour -M 512M -m "$modules" -i lab/disk-use.sh:/lab/disk-use.sh \
    -b "dd cmp md5sum mke2fs e2fsck resize2fs blkdiscard blockdev $tools" -q "$q" -t "$seconds" lab/vhost-user.sh "${arguments[@]}"
}
written() { # device
  "$FREESTONE" stat "$1" --json | grep -o '"writes": *[0-9]*' | head -1 | grep -o '[0-9]*$'; }
writes() { # device: its guest goes on
  local before; before=$(written "$1")
  for _ in $(seq 600); do [ "$(written "$1")" -gt $((before + 200)) ] && return; sleep 0.05; done; false; }
wants() { case $only in *" $1 "*) true;; *) false;; esac; }

if wants boot; then
  truncate -s 64M "$dir/base.img"
  mkdir -p "$dir/tree/bin" "$dir/tree/proc"
  cp /bin/busybox "$dir/tree/bin/busybox"
  printf '#!/bin/busybox sh\n[ -e /was-here ] && echo "data of the last boot" || echo "the base"\ntouch /was-here\n' >"$dir/tree/bin/start"
  chmod +x "$dir/tree/bin/start"
  mke2fs -q -t ext4 -d "$dir/tree" "$dir/base.img"
  serve "base=file,path=$dir/base.img,readonly=yes,publish=no"
  "$FREESTONE" fork base job >/dev/null
  "$FREESTONE" publish job --vhost-user "unix:$dir/job" >/dev/null
  for wanted in "the base" "data of the last boot" "the base"; do
    said=$(guest 120 boot -- "$dir/job")
    [ "$said" = "$wanted" ] || { echo "boot: expected '$wanted', the guest printed '$said'" >&2; exit 1; }
    case $wanted in "data of"*) "$FREESTONE" rewind job;; esac
  done
  stop
  echo "boot: a root file system on a fork is rewound between boots"
fi

if wants use; then
  serve a=ram,disksize=256M b=ram,disksize=256M,comp_algorithm=zstd
  for name in a b; do "$FREESTONE" publish $name --vhost-user "unix:$dir/$name" >/dev/null; done
  guest 300 use -- "$dir/a" "$dir/b" >"$dir/guest" & guest=$!
  # The disk grows after the guest has written for a while.
  until [ "$("$FREESTONE" stat a --json 2>/dev/null | grep -o '"orig_data_size": *[0-9]*' | grep -o '[0-9]*$')" -gt 33554432 ]; do
    sleep 0.2; kill -0 $guest 2>/dev/null || break; done
  "$FREESTONE" set a disksize=512M >/dev/null
  wait $guest || { echo "use: the guest ended with $?" >&2; cat "$dir/guest" "$dir/log" >&2; exit 1; }
  cat "$dir/guest"
  stop
fi

killed() { # part, arguments of the first server, arguments of the next ones...
  part=$1 first=$2; shift 2
  serve $first "$@"
  "$FREESTONE" publish d --vhost-user "unix:$dir/d" >/dev/null
  guest 300 killed -- "$dir/d" >"$dir/guest" & guest=$!
  kills=0
  while kill -0 $guest 2>/dev/null && [ $kills -lt 5 ]; do
    writes d || break
    kill -9 "$server"; wait "$server" || true
    serve "$@"
    kills=$((kills + 1))
  done
  wait $guest || { echo "$part: the guest ended with $?, after $kills kills" >&2; cat "$dir/guest" "$dir/log" >&2; exit 1; }
  [ $kills -ge 2 ] || { echo "$part: only $kills kills" >&2; exit 1; }
  cat "$dir/guest"
  stop
  rm -rf "$dir/state"
  echo "$part: the server was killed $kills times under a write load"
}

if wants killed; then
  truncate -s 256M "$dir/disk"
  killed killed "d=file,path=$dir/disk,publish=no" --state "$dir/state"
fi

if wants adopted; then
  killed adopted d=ram,disksize=256M,publish=no --state "$dir/state" --recoverable
fi

if wants cut; then
  serve a=ram,disksize=256M,publish=no
  "$FREESTONE" publish a --vhost-user "unix:$dir/a" >/dev/null
  guest 600 cut -- "$dir/a" >"$dir/guest" & guest=$!
  cuts=0
  while kill -0 $guest 2>/dev/null && [ $cuts -lt 8 ] && writes a; do
    if [ $cuts = 2 ]; then "$FREESTONE" set a disksize=512M >/dev/null; writes a || break; fi
    "$FREESTONE" unpublish a --force >/dev/null
    "$FREESTONE" publish a --vhost-user "unix:$dir/a" >/dev/null
    cuts=$((cuts + 1))
  done
  wait $guest || { echo "cut: the guest ended with $?, after $cuts cuts" >&2; cat "$dir/guest" "$dir/log" >&2; exit 1; }
  [ $cuts -ge 3 ] || { echo "cut: only $cuts cuts" >&2; exit 1; }
  cat "$dir/guest"
  stop
  echo "cut: the connection was cut $cuts times under a write load"
fi

if wants files; then
  serve a=ram,disksize=320M,publish=no
  "$FREESTONE" publish a --vhost-user "unix:$dir/a" >/dev/null
  modules="virtio_blk ext4 xfs btrfs f2fs" flavour=gen
  [ "${KERNEL:-6.12}" = 7 ] || modules="$modules crc32c_generic crc32_generic"
  tools="fio mkfs.ext4 mkfs.xfs xfs_repair mkfs.btrfs btrfs mkfs.f2fs fsck.f2fs"
  guest 1200 files -- "$dir/a"
  stop
fi
