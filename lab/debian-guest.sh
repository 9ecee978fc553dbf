# debian-guest.sh - sourced by scripts that boot a Debian guest: makes its disk, and an initramfs that boots from a disk. The script sets
#   dir   a temporary directory
#   lab   the directory that `kernel-lab.sh -n -k 6.12t -m virtio_blk` printed
# and defines `wrong MESSAGE`, which ends the script, and `say MESSAGE`.

# make_disk IMAGE - makes a disk of Debian 13 from the machine's own mirror: systemd, ssh, cron, nginx, compilers; 2 GiB of ext4. Needs root,
# mmdebstrap, e2fsprogs, and 4 GiB for temporary files in $dir.
make_disk() {
  local image=$1 root=$dir/tree release packages part uri suite code
  release=$(basename "$(realpath "$lab/modules")")
  say "making Debian 13 (minutes)"
  . /etc/os-release
  # shellcheck disable=SC2016 # apt's variables, not ours.
  apt-get indextargets --format '$(REPO_URI) $(RELEASE)' | sort -u | while read -r uri suite; do
    case $suite in "$VERSION_CODENAME" | "$VERSION_CODENAME"-updates | "$VERSION_CODENAME"-security)
      echo "deb $uri trixie${suite#"$VERSION_CODENAME"} main";; esac; done >"$dir/sources.list"
  [ -s "$dir/sources.list" ] || wrong "the sources of this machine name no archive of Debian's"
  packages="systemd-sysv dbus polkitd openssh-server cron rsyslog systemd-timesyncd ifupdown dhcpcd-base nginx-light unattended-upgrades"
  packages="$packages sudo locales man-db python3 perl vim gcc g++ make git gdb curl"
  mmdebstrap --quiet --mode=root --variant=standard --include="$packages" --aptopt='Acquire::Languages "none"' \
    --format=directory trixie "$root" "$dir/sources.list" >"$dir/log" 2>&1 </dev/null ||
    { code=$?; tail -n 20 "$dir/log" >&2; wrong "mmdebstrap ended with $code"; }

  mkdir -p "$root/usr/lib/modules"
  cp -a "$(realpath "$lab/modules")" "$root/usr/lib/modules/"
  chroot "$root" /usr/sbin/depmod "$release"
  echo guest >"$root/etc/hostname"
  printf '127.0.0.1 localhost\n127.0.1.1 guest\n' >"$root/etc/hosts"
  echo "/dev/vda / ext4 errors=remount-ro 0 1" >"$root/etc/fstab"
  printf 'auto lo\niface lo inet loopback\n\nallow-hotplug eth0\niface eth0 inet dhcp\n' >"$root/etc/network/interfaces"
  # With a machine ID, systemd does not treat this as the first boot.
  echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
  chroot "$root" /usr/sbin/ldconfig
  chroot "$root" /usr/bin/journalctl --update-catalog
  chroot "$root" /usr/bin/systemd-hwdb update
  for part in etc var; do touch -r "$root/usr" "$root/$part/.updated"; done
  # Boots are slow without KVM.
  mkdir -p "$root/etc/systemd/system.conf.d" "$root/etc/systemd/system/multi-user.target.wants"
  printf '[Manager]\nDefaultTimeoutStartSec=600\nDefaultDeviceTimeoutSec=600\n' >"$root/etc/systemd/system.conf.d/lab.conf"
  # `read -t` waits without reading a program from the disk. The login prompt appears long before it ends.
  cat >"$root/etc/systemd/system/booted.service" <<'END'
[Unit]
Description=Reports the end of the boot and powers off
After=multi-user.target getty.target

[Service]
StandardOutput=tty
TTYPath=/dev/console
ExecStart=/bin/bash -c 'echo "multi-user.target is reached"; read -t 20 <> <(:); exec systemctl poweroff'

[Install]
WantedBy=multi-user.target
END
  ln -s ../booted.service "$root/etc/systemd/system/multi-user.target.wants/booted.service"
  rm -rf "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  rm -f "$image.new"; truncate -s 2G "$image.new"
  mke2fs -q -t ext4 -L root -U 5f3e5a52-7c0e-4a53-9d0c-0b5f1a5e0001 -E hash_seed=5f3e5a52-7c0e-4a53-9d0c-0b5f1a5e0002 -d "$root" "$image.new"
  mv "$image.new" "$image"
  rm -rf "$root"; }

# make_initrd OUT - makes the lab's initramfs with an init that switches to the disk.
make_initrd() {
  mkdir "$dir/early"
  cat >"$dir/early/init" <<'END'
#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
/bin/modprobe virtio_blk
until [ -b /dev/vda ]; do sleep 0.1; done
mount -t ext4 -o ro /dev/vda /mnt
umount /sys /proc; mount --move /dev /mnt/dev
exec switch_root /mnt /lib/systemd/systemd
END
  chmod +x "$dir/early/init"
  (cat "$lab/initrd.img"; cd "$dir/early"; echo init | cpio -o -H newc --quiet) >"$1"; }
