#!/bin/bash
# run-libvirt.sh - runs a libvirt machine with a stock kernel and a Freestone fork as its disk (vhost-user). The machine starts three times
# and writes to its root file system; after `freestone rewind` it must find the base again. Starts its own libvirtd (qemu:///session) with
# all files in a temporary directory. FREESTONE names the program; by default it is built.
set -eu
cd "$(dirname "$0")/.."
export LAB=${LAB:-${XDG_CACHE_HOME:-$HOME/.cache}/kernel-lab}
case ${1:-} in
  "") # A machine's kernel, and a QEMU. In namespaces of our own that QEMU lies over the system's, which libvirtd starts.
    lab=$(lab/kernel-lab.sh -n -k "${KERNEL:-6.12}" -m virtio_blk lab/vhost-user.sh boot)
    trap 'rm -rf "$lab"' EXIT
    if [ -z "${FREESTONE:-}" ]; then cargo build --quiet --package freestone-cli; fi
    export FREESTONE=${FREESTONE:-${CARGO_TARGET_DIR:-target}/debug/freestone}
    unshare --user --map-root-user --mount "lab/${0##*/}" over "$lab"; exit;;
  over)
    for part in bin/qemu-system-x86_64 share/qemu share/seabios lib/x86_64-linux-gnu/qemu; do
      mount --bind "$LAB/cache/qemu10/usr/$part" "/usr/$part"; done
    # As root, libvirtd would be the system's instance. As nobody it is a user's, and can still access our files.
    exec unshare --user --map-user=65534 "lab/${0##*/}" user "$2";;
esac
lab=$2
dir=$(mktemp -d)
pids=
end() { for pid in $pids; do kill "$pid" 2>/dev/null && wait "$pid" || true; done; rm -rf "$dir"; }
trap end EXIT
wrong() { echo "libvirt: $1" >&2; tail -n 20 "$dir"/log.* "$dir"/console "$dir"/cache/libvirt/qemu/log/* >&2 2>/dev/null || true; exit 1; }
soon() { # seconds command...
  tenths=$(($1 * 10)); shift
  while ! "$@" >/dev/null 2>&1; do [ $tenths -gt 0 ] || return 1; tenths=$((tenths - 1)); sleep 0.1; done; }
FREESTONE=$(realpath "$FREESTONE")

# The disk: a root file system that prints whether it was booted before.
truncate -s 64M "$dir/base.img"
mkdir -p "$dir/tree/bin" "$dir/tree/proc"
cp /bin/busybox "$dir/tree/bin/busybox"
printf '#!/bin/busybox sh\n[ -e /was-here ] && echo "data of the last boot" || echo "the base"\ntouch /was-here\n' >"$dir/tree/bin/start"
chmod +x "$dir/tree/bin/start"
mke2fs -q -t ext4 -d "$dir/tree" "$dir/base.img"
export FREESTONE_CONTROL=$dir/control
"$FREESTONE" serve "base=file,path=$dir/base.img,readonly=yes,publish=no" --nbd "unix:$dir/nbd" --control "$dir/control" \
  >"$dir/log.freestone" 2>&1 & pids=$!
"$FREESTONE" wait
"$FREESTONE" fork base vm-7 >/dev/null
"$FREESTONE" publish vm-7 --vhost-user "unix:$dir/vm-7.sock" >/dev/null

# A private libvirtd.
export HOME=$dir XDG_RUNTIME_DIR=$dir/run XDG_CONFIG_HOME=$dir/config XDG_CACHE_HOME=$dir/cache XDG_DATA_HOME=$dir/data
export LIBVIRT_DEFAULT_URI=qemu:///session
mkdir -p "$dir/run" "$dir/config/libvirt"
echo 'stdio_handler = "file"' >"$dir/config/libvirt/qemu.conf"
libvirtd >"$dir/log.libvirtd" 2>&1 & pids="$! $pids"
soon 30 virsh version || wrong "libvirtd does not respond"

cat >"$dir/vm-7.xml" <<END
<domain type='qemu'>
  <name>vm-7</name>
  <memory unit='MiB'>512</memory>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>$lab/vmlinuz</kernel>
    <initrd>$lab/initrd.img</initrd>
    <cmdline>$(cat "$lab/append")</cmdline>
  </os>
  <cpu mode='maximum'><feature policy='disable' name='la57'/></cpu>
  <features><acpi/></features>
  <on_reboot>destroy</on_reboot>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw' queues='2'/>
      <source type='unix' path='$dir/vm-7.sock'><reconnect enabled='yes' timeout='1'/></source>
      <target dev='vda' bus='virtio'/>
    </disk>
    <serial type='file'><source path='$dir/console'/><target port='0'/></serial>
    <serial type='file'><source path='$dir/said'/><target port='1'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
END
virsh --quiet define "$dir/vm-7.xml" --validate || wrong "libvirt rejects the domain"
is_off() { [ "$(virsh --quiet domstate vm-7)" = "shut off" ]; }
for wanted in "the base" "data of the last boot" "the base"; do
  virsh --quiet start vm-7 || wrong "libvirt cannot start the domain"
  soon 120 is_off || wrong "the domain does not shut down"
  said=$(sed '/^LAB-EXIT:0$/d; /^$/d' "$dir/said")
  [ "$said" = "$wanted" ] || wrong "expected '$wanted', the guest printed '$said'"
  case $wanted in "data of"*) "$FREESTONE" rewind vm-7;; esac
done
echo "libvirt $(virsh version | sed -n 's/^Using library: libvirt //p'): a root file system on a fork is rewound between boots"
