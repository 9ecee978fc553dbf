#!/bin/bash
# run-systemd.sh - tests packaging/systemd and packaging/udev on a Debian 13 host with systemd and udev, in QEMU with a stock kernel: a file
# system is made once on a Freestone block device, mounted by name at each boot, and unmounted before the server ends, also at a reboot;
# /tmp is on a compressed RAM disk; the kernel's NBD client has a mount; a socket starts a server for each client; an unprivileged server
# runs as its own user and has nightly pushes (see systemd.sh). FREESTONE names the program; by default it is built.
set -eu
cd "$(dirname "$0")/.."
LAB=${LAB:-${XDG_CACHE_HOME:-$HOME/.cache}/kernel-lab}
if [ -z "${FREESTONE:-}" ]; then cargo build --quiet --package freestone-cli; fi
FREESTONE=${FREESTONE:-${CARGO_TARGET_DIR:-target}/debug/freestone}
sh benches/peers/debian13.sh "$LAB/cache/systemd13" systemd-sysv udev kmod mount util-linux e2fsprogs base-files base-passwd \
  liblzma5 bash dash coreutils grep sed findutils
sh benches/peers/debian13.sh "$LAB/cache/nbd13" nbd-client
lab=$(lab/kernel-lab.sh -n -k "${KERNEL:-6.12}" /dev/null)
dir=$(mktemp -d); root=$dir/root
trap 'rm -rf "$dir" "$lab"' EXIT

# The host: unpacked Debian packages, the files that their scripts would create, one module.
mask() { mkdir -p "$root/etc/systemd/${1%/*}"; ln -s /dev/null "$root/etc/systemd/$1"; }
mkdir "$root"
for tree in nbd13 systemd13; do
  tar -C "$LAB/cache/$tree" --exclude=./usr/share/doc --exclude=./usr/share/man --exclude=./usr/share/locale -c . | tar -C "$root" -x
done
for list in passwd group; do cp "$root/usr/share/base-passwd/$list.master" "$root/etc/$list"; done
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
echo host >"$root/etc/hostname"
mkdir -p "$root/var/log/journal" "$root/etc/systemd/system/multi-user.target.wants"
ln -s /usr/lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"
# Disable units that cost seconds without KVM and are not needed here, and extend timeouts.
for name in debug getty gpt-auto hibernate-resume rc-local run ssh system-update sysv tpm2; do
  mask "system-generators/systemd-$name-generator"; done
for unit in dev-hugepages.mount dev-mqueue.mount proc-sys-fs-binfmt_misc.automount sys-fs-fuse-connections.mount sys-kernel-config.mount \
  sys-kernel-debug.mount sys-kernel-tracing.mount ldconfig.service systemd-{ask-password-console,ask-password-wall}.path \
  systemd-{binfmt,firstboot,hibernate-clear,hwdb-update,journal-catalog-update,logind,pcrmachine,pcrphase,pcrphase-sysinit}.service \
  systemd-{random-seed,tpm2-setup,tpm2-setup-early,user-sessions,update-done,machine-id-commit}.service \
  getty.target getty-static.service systemd-{creds,hostnamed,pcrextend,pcrlock,sysext}.socket; do mask "system/$unit"; done
mkdir "$root/etc/systemd/system.conf.d"
printf '[Manager]\nDefaultTimeoutStartSec=600\nDefaultDeviceTimeoutSec=600\n' >"$root/etc/systemd/system.conf.d/lab.conf"
kernel=$(basename "$(realpath "$lab/modules")")
mkdir -p "$root/usr/lib/modules/$kernel/kernel/drivers/block"
cp "$lab"/modules/modules.builtin* "$lab/modules/modules.order" "$root/usr/lib/modules/$kernel"
cp "$lab"/modules/kernel/drivers/block/{ublk_drv,nbd}.ko* "$root/usr/lib/modules/$kernel/kernel/drivers/block"
unshare --user --map-root-user chroot "$root" depmod "$kernel"

# Install Freestone from packaging.
strip -o "$root/usr/bin/freestone" "$FREESTONE"
install -D -m 755 packaging/udev/freestone-name "$root/usr/lib/freestone/freestone-name"
install -D -m 644 packaging/udev/61-freestone-names.rules "$root/usr/lib/udev/rules.d/61-freestone-names.rules"
install -m 755 packaging/systemd/freestone-mkfs "$root/usr/lib/freestone/freestone-mkfs"
install -m 644 packaging/systemd/*.service packaging/systemd/*.socket "$root/usr/lib/systemd/system"
install -m 644 packaging/systemd/*.mount "$root/etc/systemd/system"
cat >"$root/etc/freestone.toml" <<END
nbd = "unix:/run/freestone/nbd.sock"
state = "/var/lib/freestone/state"
save_every = "10m"

[[device]]
name = "data"
kind = "file"
path = "/var/lib/freestone/data.img"
size = "64M"

[[device]]
name = "job-7"
kind = "ram"
disksize = "64M"
publish = false

[[device]]
name = "build"
kind = "ram"
disksize = "64M"
keep = true
on_data_loss = "empty"

[[device]]
name = "scratch"
kind = "file"
path = "/var/lib/freestone/scratch.img"
size = "32M"
END
# The user that the package creates, and the configuration of its server.
echo 'freestone:x:999:999:Freestone:/nonexistent:/usr/sbin/nologin' >>"$root/etc/passwd"
echo 'freestone:x:999:' >>"$root/etc/group"
{ cat packaging/etc/freestone-server.toml
  printf '\nstate = "/var/lib/freestone-server/state"\n\n[[device]]\nname = "vm"\nkind = "file"\npath = "/var/lib/freestone-server/vm.img"\nsize = "16M"\n'
  printf '\n[[device]]\nname = "golden"\nkind = "file"\npath = "/var/lib/freestone-server/golden.img"\nreadonly = true\n'
} >"$root/etc/freestone-server.toml"
mkdir -p "$root/var/lib/freestone-server"; head -c 1M "$root/usr/bin/bash" >"$root/var/lib/freestone-server/golden.img"
# Install examples from docs/: the units of the nightly push, with a directory as the store, and the drop-in for machines without ublk.
shown() { # PAGE LINE
  awk -v line="$2" 'index($0, line) { on = 1; next } on && /^    / { sub(/^ +/, ""); print; seen = 1; next } on && NF && seen { exit }' "$1"; }
for unit in service timer; do
  shown docs/how-to/object-storage.md "\`/etc/systemd/system/freestone-push.$unit\`:" | sed 's|s3://fleet/images|file:///var/lib/freestone-server/images|' \
    >"$root/usr/lib/systemd/system/freestone-push.$unit"; done
shown docs/how-to/object-storage.md '(`chmod 600`):' >"$root/etc/freestone-store.env"; chmod 600 "$root/etc/freestone-store.env"
mkdir -p "$root/etc/systemd/system/freestone-server.service.d"
printf '[Service]\nEnvironmentFile=/etc/freestone-store.env\n' >"$root/etc/systemd/system/freestone-server.service.d/store.conf"
shown docs/how-to/services.md 'By `systemctl edit freestone`' >"$root/etc/freestone-without-ublk.conf"
mkdir -p "$root"/srv/{data,build,scratch,far} "$root"/etc/{freestone-mkfs,freestone-nbd} "$root/etc/systemd/system/freestone-tmp.service.d"
# The recipe of docs/how-to/services.md with smaller sizes.
printf '[Service]\nExecStart=\nExecStart=/usr/bin/freestone serve --ublk --nbd unix:/run/freestone-tmp/nbd.sock tmp=ram,disksize=256M,mem_limit=64M\n' \
  >"$root/etc/systemd/system/freestone-tmp.service.d/size.conf"
echo 'MKFS_OPTIONS="-q -O ^has_journal -E root_perms=1777"' >"$root/etc/freestone-mkfs/tmp"
printf 'SERVER=-unix /run/freestone/nbd.sock\nDEVICE=/dev/nbd0\n' >"$root/etc/freestone-nbd/scratch"
printf 'SERVER=127.0.0.1 10811\nDEVICE=/dev/nbd3\n' >"$root/etc/freestone-nbd/far"
printf '[[device]]\nname = "own"\nkind = "ram"\ndisksize = "16M"\n' >"$root/etc/freestone-single.toml"
echo '/dev/nbd0 /srv/scratch ext4 _netdev,x-systemd.requires=freestone-nbd@scratch.service,x-systemd.requires=freestone.service,x-systemd.makefs 0 0' >"$root/etc/fstab"
echo '/dev/nbd3 /srv/far ext4 noauto,_netdev,x-systemd.requires=freestone-nbd@far.service,x-systemd.makefs 0 0' >>"$root/etc/fstab"
echo "/dev/freestone/data /srv/data ext4 _netdev,x-systemd.requires=freestone.service,x-systemd.makefs 0 0" >>"$root/etc/fstab"

install -m 755 lab/systemd.sh "$root/usr/bin/lab"
printf '[Service]\nExecStart=/usr/bin/lab\nStandardOutput=file:/dev/ttyS1\nStandardError=inherit\n' >"$root/usr/lib/systemd/system/lab.service"
for unit in freestone.service freestone-server.service lab.service remote-fs.target; do
  ln -s "/usr/lib/systemd/system/$unit" "$root/etc/systemd/system/multi-user.target.wants/$unit"; done
mkdir -p "$root"/etc/systemd/system/{local-fs,remote-fs,sockets}.target.wants
ln -s ../tmp.mount "$root/etc/systemd/system/local-fs.target.wants/tmp.mount"
ln -s ../srv-build.mount "$root/etc/systemd/system/remote-fs.target.wants/srv-build.mount"
ln -s /usr/lib/systemd/system/freestone.socket "$root/etc/systemd/system/sockets.target.wants/freestone.socket"
truncate -s 600M "$dir/disk"
# All files belong to root in the guest.
unshare --user --map-root-user mke2fs -q -t ext4 -d "$root" "$dir/disk"

# The guest's clock counts instructions, so that no timeout expires on a busy machine.
timeout "${SECONDS_AT_MOST:-1500}" "$lab/qemu" -accel tcg,thread=single -icount shift=3 -smp 1 -m 1G -cpu max,la57=off -M q35 -nodefaults -display none -monitor none \
  -drive "file=$dir/disk,format=raw,if=none,id=d,cache=unsafe" -device nvme,drive=d,serial=lab \
  -serial "file:$dir/console" -serial "file:$dir/said" -kernel "$lab/vmlinuz" \
  -append "$(cat "$lab/append") root=/dev/nvme0n1 rw systemd.show_status=no systemd.service_watchdogs=no systemd.journald.forward_to_console=yes" </dev/null || echo "qemu ended with $?" >&2
tr -d '\r' <"$dir/said" >"$dir/told"
grep -v '^LAB-EXIT' "$dir/told" || true
grep -q '^LAB-EXIT:0$' "$dir/told" || { echo "systemd: the test did not finish" >&2; tail -n 60 "$dir/console" >&2; exit 1; }
