#!/bin/bash
# run-nbd.sh [clients|kernel]... - tests the NBD server with clients that the machine does not have:
#   clients  libnbd 1.22 and QEMU 10 of Debian 13, unpacked beside the system's: every kind of negotiation, every flag, requests of 8 TiB,
#            several contexts (see nbd-clients.py), maps and copies of nbdinfo, nbdcopy, qemu-img and qemu-io
#   kernel   the driver of stock kernels (6.12 and 7): file systems, fio, trims, and disks that are disconnected, unpublished, or whose
#            server is killed, under load (see nbd-kernel.sh)
# Runs both parts by default. FREESTONE names the program; by default it is built.
set -eu
cd "$(dirname "$0")/.."
only=" ${*:-clients kernel} "
LAB=${LAB:-${XDG_CACHE_HOME:-$HOME/.cache}/kernel-lab}
dir=$(mktemp -d)
server=
end() { [ -z "$server" ] || kill -9 "$server" 2>/dev/null || true; rm -rf "$dir"; }
trap end EXIT
if [ -z "${FREESTONE:-}" ]; then
  cargo build --quiet --package freestone-cli
  FREESTONE=${CARGO_TARGET_DIR:-target}/debug/freestone
fi
FREESTONE=$(realpath "$FREESTONE")
wants() { case $only in *" $1 "*) true;; *) false;; esac; }
wrong() { echo "FAIL $*" >&2; cat "$dir/log" >&2; exit 1; }

if wants clients; then
  mkdir -p "$LAB/cache"
  tree=$LAB/cache/nbd-clients13
  sh benches/peers/debian13.sh "$tree" libnbd-bin python3-libnbd qemu-utils
  loader=$(echo "$tree"/usr/lib/*/ld-linux*.so.*); libraries=${loader%/*}
  run() { # program arguments..: one of the tree's, on its own libraries
    local program=$1; shift
    PYTHONHOME=$tree/usr PYTHONPATH=$tree/usr/lib/python3/dist-packages timeout 300 \
      "$loader" --library-path "$libraries" "$tree/usr/bin/$program" "$@"; }
  said() { # what-is-wanted what-was-said
    [ "$1" = "$2" ] || wrong "expected '$1', found '$2'"; }

  truncate -s 6T "$dir/base"
  head -c 1M /dev/zero | tr '\0' b | dd of="$dir/base" bs=1M seek=1M conv=notrunc status=none
  export FREESTONE_CONTROL=$dir/control
  "$FREESTONE" serve r=ram,disksize=8T "base=file,path=$dir/base,readonly=yes" copy=ram,disksize=6T \
    --nbd "unix:$dir/nbd" --control "$dir/control" >"$dir/said" 2>"$dir/log" & server=$!
  "$FREESTONE" wait
  "$FREESTONE" fork base f >/dev/null; "$FREESTONE" publish f --nbd "unix:$dir/nbd" >/dev/null
  at() { echo "nbd+unix:///$1?socket=$dir/nbd"; }

  run python3 lab/nbd-clients.py "$dir/nbd" "$dir" || wrong "libnbd"

  run nbdinfo "$(at r)" >"$dir/info"
  grep -q 'using extended packets' "$dir/info" || wrong "nbdinfo: $(cat "$dir/info")"
  said "         0  8796093022208    3  hole,zero" "$(run nbdinfo --map "$(at r)")"
  for what in trim zero fua cache df flush multi-conn fast-zero; do run nbdinfo --can $what "$(at r)" || wrong "nbdinfo --can $what"; done
  run nbdinfo --map=freestone:changed --totals "$(at f)" >"$dir/changed" || wrong "nbdinfo --map=freestone:changed"
  said "4096 1" "$(awk '$3 == 1 { print $1, $3 }' "$dir/changed")"
  echo "ok   nbdinfo"

  # Disks of 6 TiB that contain one megabyte; every tool copies only the data.
  run nbdcopy "$(at base)" "$(at copy)" || wrong "nbdcopy"
  run qemu-img compare -U -f raw -F raw "$(at base)" "$(at copy)" | grep -q identical || wrong "qemu-img compare after nbdcopy"
  "$FREESTONE" reset copy --force >/dev/null
  run qemu-img convert -n -f raw -O raw "$(at base)" "$(at copy)" || wrong "qemu-img convert"
  run qemu-img compare -U -f raw -F raw "$(at base)" "$(at copy)" | grep -q identical || wrong "qemu-img compare after convert"
  run qemu-img map --output=json -f raw "$(at base)" >"$dir/map" || wrong "qemu-img map"
  said 3 "$(wc -l <"$dir/map")"
  x="driver=raw,file.driver=nbd,file.export=f,file.server.type=unix,file.server.path=$dir/nbd,file.x-dirty-bitmap=freestone:changed"
  # QEMU treats any context as dirty blocks, and reports ranges by the lowest bit of the flags.
  run qemu-img map --output=json --image-opts "$x" >"$dir/map" || wrong "qemu-img map of freestone:changed"
  said 2 "$(wc -l <"$dir/map")"
  echo "ok   copies and maps of 6 TiB"

  # Each trim or zero request covers half of the disk.
  run qemu-io -f raw -c "write -P 5 4T 64k" -c "read -P 5 4T 64k" -c "write -z -u -n 3T 2T" -c "read -P 0 4T 64k" \
    -c "write -P 6 7T 1M" -c "discard 6T 1G" -c "write -z 7T 64k" -c "read -P 0 7T 64k" \
    -c "write -z 7T 1M" -c "read -P 0 7T 1M" -c flush "$(at r)" >"$dir/io" || wrong "qemu-io: $(cat "$dir/io")"
  ! grep -i 'failed\|error\|invalid' "$dir/io" || wrong "qemu-io"
  # Zeroes that must stay allocated are not faster than data.
  run qemu-io -f raw -c "write -z -n 7T 64k" "$(at r)" 2>&1 | grep -q 'not supported' || wrong "qemu-io -z -n"
  echo "ok   qemu-io"
  kill $server; wait $server || wrong "the server ended with $?"; server=
fi

if wants kernel; then
  strip -o "$dir/freestone" "$FREESTONE"
  for kernel in ${KERNELS:-6.12 7}; do
    echo "== $kernel"
    modules="nbd ext4 xfs"; [ "$kernel" = 7 ] || modules="$modules crc32c_generic crc32_generic"
    lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules" -t 1200 -i lab/disk-use.sh:/lab/disk-use.sh \
      -b "dd md5sum fio blockdev blkdiscard fstrim nbd-client mkfs.ext4 e2fsck mkfs.xfs xfs_repair $dir/freestone" lab/nbd-kernel.sh
  done
fi
