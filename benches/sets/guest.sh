#!/bin/bash
# guest.sh DISK [MEMORY] - makes data sets of a Debian guest: its disk (2 GiB of ext4), unless DISK exists, and its memory (512 MiB) once it has
# booted to multi-user.target and a login prompt. `benches/src/data` runs this. Needs root, mmdebstrap, the tools of the kernel lab, 5 GiB for
# temporary files, and 5 to 10 minutes; no KVM.
set -eu
disk=$(realpath -m "$1") memory=${2:+$(realpath -m "$2")}
cd "$(dirname "$0")/../.."
seconds=900
wrong() { echo "$1" >&2; exit 1; }
say() { echo "$1" >&2; }
for tool in mmdebstrap mke2fs cpio; do command -v $tool >/dev/null || wrong "there is no $tool (apt-get install mmdebstrap e2fsprogs cpio)"; done
[ "$(id -u)" = 0 ] || wrong "the files of a guest belong to root: run this as root"

. lab/debian-guest.sh
dir=$(mktemp -d) lab= qemu=
end() {
  [ -z "$qemu" ] || { kill "$qemu" && wait "$qemu"; } 2>/dev/null || true
  rm -rf "$dir" ${lab:+"$lab"} "$disk.new" ${memory:+"$memory.new"}; }
trap end EXIT
trap 'exit 1' HUP INT TERM
lab=$(lab/kernel-lab.sh -n -k 6.12t -m virtio_blk /dev/null) || wrong "no kernel and no QEMU"
[ -e "$disk" ] || make_disk "$disk"
[ -n "$memory" ] || exit 0

# The guest's memory is a file, which stays when QEMU ends. Writes to the disk go to a temporary file.
make_initrd "$dir/initrd.img"
truncate -s 512M "$memory.new"
say "booting Debian (minutes)"
TMPDIR=$dir timeout $seconds "$lab/qemu" -accel tcg,thread=multi -smp 2 -cpu max,la57=off -m 512M -M q35,memory-backend=m \
  -object "memory-backend-file,id=m,size=512M,share=on,mem-path=$memory.new" -nodefaults -display none -monitor none -no-reboot \
  -drive "file=$disk,format=raw,if=none,id=d,snapshot=on" -device virtio-blk-pci,drive=d \
  -netdev user,id=n,restrict=on -device virtio-net-pci,netdev=n -device virtio-rng-pci -serial "file:$dir/console" \
  -kernel "$lab/vmlinuz" -initrd "$dir/initrd.img" -append "$(cat "$lab/append") net.ifnames=0" </dev/null >"$dir/qemu.log" 2>&1 & qemu=$!
until grep -aq 'multi-user.target is reached' "$dir/console" 2>/dev/null && grep -aq 'login: ' "$dir/console"; do
  kill -0 $qemu 2>/dev/null || { tail -n 20 "$dir/console" "$dir/qemu.log" >&2; wrong "the guest did not boot"; }
  sleep 0.1; done
kill $qemu; wait $qemu || true; qemu=
mv "$memory.new" "$memory"
