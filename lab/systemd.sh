#!/bin/bash
# systemd.sh - runs as a unit on the host of run-systemd.sh at each of two boots. The first failure ends the test.
set -eu
trap 'wrong "line $LINENO"' ERR
wrong() { trap - ERR; echo "FAIL $1"; systemctl --no-pager status 'freestone*' srv-data.mount tmp.mount || true; journalctl -b --no-pager | tail -n 60; systemctl poweroff; exit 1; }
soon() { # seconds command...
  for _ in $(seq "$1"); do "${@:2}" >/dev/null 2>&1 && return; sleep 1; done; return 1; }
settled() { [ "$(systemctl is-system-running)" != starting ]; }
absent() { [ ! -e "$1" ]; }
is() { # WHAT WANTED FOUND
  [ "$2" = "$3" ] || wrong "$1: expected '$2', found '$3'"; }
line() { journalctl -b -1 -o cat --no-pager | grep -n "$1" | tail -n 1 | cut -d: -f1; } # of the last boot's journal
export FREESTONE_CONTROL=/run/freestone/control.sock

soon 600 settled || wrong "the boot does not end"
is "units that failed" "" "$(systemctl --no-legend --plain --state=failed list-units | cut -d' ' -f1 | tr '\n' ' ')"
is "the system" running "$(systemctl is-system-running || true)"
is "the mount" active "$(systemctl is-active srv-data.mount)"
disk=$(readlink -f /dev/freestone/data); [ -b "$disk" ] || wrong "no /dev/freestone/data"
is "what is mounted" "$disk" "$(findmnt -n -o SOURCE /srv/data)"

is "/tmp" "$(readlink -f /dev/freestone/tmp) ext4 1777" "$(findmnt -n -o SOURCE,FSTYPE /tmp | tr -s ' ') $(stat -c %a /tmp)"
is "files in /tmp" "" "$(find /tmp -name 'lab.*')"
is "/srv/build" "$(readlink -f /dev/freestone/build)" "$(findmnt -n -o SOURCE /srv/build)"
is "/srv/scratch" /dev/nbd0 "$(findmnt -n -o SOURCE /srv/scratch)"
# Checks the server of user freestone: its rights, its socket, and reads of the kernel's NBD client.
served=/run/freestone-server
own_server() {
  is "freestone-server" active "$(systemctl is-active freestone-server.service || true)"
  status=/proc/$(systemctl show -P MainPID freestone-server.service)/status
  is "the user of freestone-server" freestone "$(id -un "$(sed -n 's/^Uid:[[:space:]]*\([0-9]*\).*/\1/p' "$status")")"
  is "its capabilities" 0000000000000000 "$(sed -n 's/^CapEff:[[:space:]]*//p' "$status")"
  is "its directories" "freestone 750 freestone 700 freestone 700" \
    "$(stat -c '%U %a' $served /var/lib/freestone-server /var/cache/freestone-server | tr '\n' ' ' | sed 's/ $//')"
  is "its socket" "freestone freestone 660" "$(stat -c '%U %G %a' $served/nbd.sock)"
  modprobe nbd
  nbd-client -unix $served/nbd.sock -name vm /dev/nbd2 >/dev/null || wrong "freestone-server serves no client"
}
tmp_stat() { freestone stat tmp --control /run/freestone-tmp/control.sock --json | sed -n "s/^ *\"$1\": \([0-9]*\).*/\1/p" | head -n 1; }

if [ ! -e /srv/data/boot ]; then
  echo first >/srv/data/boot
  seq 2000000 >/tmp/lab.numbers; sync -f /tmp
  data=$(tmp_stat orig_data_size); stored=$(tmp_stat compr_data_size)
  [ "$data" -gt 12000000 ] && [ "$stored" -lt $((data / 4 * 3)) ] || wrong "/tmp is not compressed: $data bytes in $stored"
  rm /tmp/lab.numbers; sync -f /tmp
  left=$(tmp_stat orig_data_size)
  [ "$left" -lt $((data / 2)) ] || wrong "removed files of /tmp stay in memory: $left of $data bytes"
  echo "ok   /tmp is on a compressed RAM disk: $data bytes in $stored, $left after they were removed"
  echo stays >/tmp/lab.boot; echo built >/srv/build/made; echo kept >/srv/scratch/kept; sync
  for unit in 'freestone-mkfs@tmp.service' 'freestone-mkfs@build.service'; do is "$unit" success "$(systemctl show -P Result "$unit")"; done
  echo "ok   $(uname -r), $(systemctl --version | head -n 1): a new file system on /dev/freestone/data is mounted"
  other=$(freestone publish job-7 --ublk)
  soon 60 test -e /dev/freestone/job-7 || wrong "no /dev/freestone/job-7"
  is "job-7" "$other" "$(readlink -f /dev/freestone/job-7)"
  freestone unpublish job-7
  soon 60 absent /dev/freestone/job-7 || wrong "/dev/freestone/job-7 is left"
  echo "ok   a device that is published later has its name, until it is unpublished"
  printf '\n[[device]]\nname = "more"\nkind = "ram"\ndisksize = "1M"\n' >>/etc/freestone.toml
  systemctl reload freestone.service || wrong "the reload fails"
  soon 60 test -e /dev/freestone/more || wrong "no /dev/freestone/more after the reload"
  is "after the reload, the mount" active "$(systemctl is-active srv-data.mount)"
  is "after the reload, data" "$disk" "$(readlink -f /dev/freestone/data)"
  echo "ok   a reload applies changes of the file and keeps other devices"
  own_server
  dd if=/usr/bin/bash of=/dev/nbd2 bs=64k count=8 oflag=direct conv=fsync 2>/dev/null || wrong "freestone-server rejects a write"
  nbd-client -d /dev/nbd2 >/dev/null
  printf '\n[[device]]\nname = "more"\nkind = "ram"\ndisksize = "1M"\n' >>/etc/freestone-server.toml
  systemctl reload freestone-server.service || wrong "the reload of freestone-server fails"
  has_more() { freestone list --control $served/control.sock | grep -q '^more '; }
  soon 60 has_more || wrong "freestone-server has not applied its file after the reload"
  systemctl restart freestone-server.service || wrong "freestone-server does not start again"
  has_more || wrong "freestone-server has not applied its file after a restart"
  systemctl stop freestone-server.service
  is "the end of freestone-server" success "$(systemctl show -P Result freestone-server.service)"
  absent $served || wrong "$served is left"
  systemctl start freestone-server.service || wrong "freestone-server does not start"
  echo "ok   freestone-server serves as user freestone without a capability, is reloaded, restarted and stopped"
  systemctl enable --now freestone-push.timer 2>/dev/null || wrong "the timer of the nightly push"
  is "the timer of the nightly push" active "$(systemctl is-active freestone-push.timer || true)"
  store=file:///var/lib/freestone-server/images
  systemctl start freestone-push.service || wrong "the nightly push fails: $(journalctl -u freestone-push -o cat --no-pager)"
  is "the end of the nightly push" success "$(systemctl show -P Result freestone-push.service)"
  freestone images $store | grep -q "^nightly-$(date -u +%F) " || wrong "the nightly push has set no tag: $(freestone images $store)"
  is "owner of the store" freestone "$(stat -c %U /var/lib/freestone-server/images)"
  systemctl stop freestone-push.timer
  echo "ok   the units of the nightly push push and prune as user freestone"
  (cd /run && exec freestone serve far=ram,disksize=16M --nbd tcp:0.0.0.0:10811 --allow-plaintext --control /run/far.sock >/dev/null 2>&1) & far=$!
  freestone wait --control /run/far.sock --timeout 2m >/dev/null || wrong "the server by TCP does not start"
  systemctl start srv-far.mount || wrong "a mount from a server by TCP"
  is "/srv/far" /dev/nbd3 "$(findmnt -n -o SOURCE /srv/far)"
  echo far >/srv/far/file; sync -f /srv/far
  systemctl stop srv-far.mount freestone-nbd@far.service
  is "clients of the server by TCP" 0 "$(freestone list --control /run/far.sock --json | sed -n 's/^ *"connections": \([0-9]*\).*/\1/p')"
  kill $far; wait $far || wrong "the server by TCP ends with $?"
  echo "ok   the kernel's NBD client has a mount from a server by TCP"
  for client in 1 2; do
    nbd-client -unix /run/freestone.sock -name own /dev/nbd1 >/dev/null || wrong "the socket serves no client"
    is "a new disk for each client" 0 "$(dd if=/dev/nbd1 bs=1M count=1 iflag=direct 2>/dev/null | tr -d '\0' | wc -c)"
    dd if=/usr/bin/bash of=/dev/nbd1 bs=64k count=8 oflag=direct 2>/dev/null
    is "what a client of the socket reads" "$(head -c 512K /usr/bin/bash | sha256sum)" "$(head -c 512K /dev/nbd1 | sha256sum)"
    is "servers for clients" 1 "$(systemctl --no-legend --plain list-units 'freestone@*' | wc -l)"
    nbd-client -d /dev/nbd1 >/dev/null
    gone() { [ -z "$(systemctl --no-legend --plain list-units 'freestone@*')" ]; }
    soon 60 gone || wrong "the server of client $client still runs after the client has ended"
  done
  is "units that failed" "" "$(systemctl --no-legend --plain --state=failed list-units | cut -d' ' -f1 | tr '\n' ' ')"
  echo "ok   the socket starts a server for each client, which ends with the client"
  freestone unpublish data 2>/dev/null && wrong "a mounted device is unpublished"
  systemctl stop freestone.service
  is "after the stop, the mount" inactive "$(systemctl is-active srv-data.mount || true)"
  absent "$disk" || wrong "$disk is left"
  is "the server's end" success "$(systemctl show -P Result freestone.service)"
  for unit in srv-scratch.mount srv-build.mount freestone-nbd@scratch.service; do
    is "after the stop, $unit" inactive "$(systemctl is-active $unit || true)"; done
  systemctl start srv-data.mount srv-build.mount srv-scratch.mount
  is "what was written" first "$(cat /srv/data/boot)"
  echo "ok   a stop of the server unmounts first; a mount starts the server"
  is "what the NBD client reads from the server that came back" kept "$(cat /srv/scratch/kept)"
  echo again >/srv/scratch/again
  dmesg | grep -q "I/O error, dev nbd0" && wrong "the NBD client had errors"
  echo "ok   a stop of the server also unmounts disks of the NBD client, which are mounted again later"
  systemctl reboot 2>/dev/null # without dbus it says so
  exit
fi
is "a RAM disk's content, kept" 1 "$(freestone stat build --json | grep -c '"generation": 1,')"
is "what was written before the reboot" "first built kept again" "$(cat /srv/data/boot /srv/build/made /srv/scratch/{kept,again} | tr '\n' ' ' | sed 's/ $//')"
own_server
is "what was written to freestone-server before the reboot" "$(head -c 512K /usr/bin/bash | sha256sum)" "$(head -c 512K /dev/nbd2 | sha256sum)"
nbd-client -d /dev/nbd2 >/dev/null
echo "ok   freestone-server has its data after the reboot"
unmounted=$(line "Unmounted srv-data.mount"); stopping=$(line "Stopping freestone.service"); ended=$(line "freestone.service: Deactivated successfully")
[ -n "$unmounted" ] && [ -n "$stopping" ] && [ -n "$ended" ] && [ "$unmounted" -lt "$stopping" ] && [ "$stopping" -lt "$ended" ] ||
  wrong "the reboot's order: unmounted $unmounted, stopping $stopping, ended $ended"
journalctl -b -u freestone-mkfs@build.service -o cat --no-pager | grep -q "blkid finds a signature" ||
  wrong "freestone-mkfs does not report the existing file system"
unmounted=$(line "Unmounted tmp.mount"); stopping=$(line "Stopping freestone-tmp.service"); ended=$(line "freestone-tmp.service: Deactivated successfully")
[ -n "$unmounted" ] && [ -n "$stopping" ] && [ -n "$ended" ] && [ "$unmounted" -lt "$stopping" ] && [ "$stopping" -lt "$ended" ] ||
  wrong "the reboot's order of /tmp: unmounted $unmounted, stopping $stopping, ended $ended"
echo "ok   /tmp was unmounted before its server ended, and is new after the reboot"
[ -z "$(line "timed out")" ] || wrong "the reboot waited: $(journalctl -b -1 -o cat | grep "timed out")"
dmesg | grep -q "EXT4-fs (${disk#/dev/}): recovery complete" && wrong "the disk was not unmounted cleanly"
echo "ok   a persistent RAM disk keeps its content over a stop and a reboot"
echo "ok   a reboot unmounts and ends the server, and the next boot mounts the same data"
# Simulates a machine without ublk. The state names ublk block devices, so the server gets a new state.
systemctl stop freestone.service
sed -i 's|/var/lib/freestone/state|/var/lib/freestone/other|' /etc/freestone.toml
install -D -m 644 /etc/freestone-without-ublk.conf /etc/systemd/system/freestone.service.d/without-ublk.conf
systemctl daemon-reload
systemctl start srv-scratch.mount || wrong "a mount by the NBD client, without ublk"
is "what the NBD client reads without ublk" "kept again" "$(cat /srv/scratch/{kept,again} | tr '\n' ' ' | sed 's/ $//')"
is "block devices by ublk" tmp "$(ls /dev/freestone)"
systemctl stop freestone.service
is "after the stop, srv-scratch.mount" inactive "$(systemctl is-active srv-scratch.mount || true)"
echo "ok   a server without ublk has its mount by the kernel's NBD client"
for unit in freestone.service freestone-server.service freestone-tmp.service freestone-mkfs@build.service freestone-nbd@scratch.service freestone@x.service; do
  echo "     $(systemd-analyze security --no-pager $unit | tail -n 1)"
done
echo LAB-EXIT:0
systemctl poweroff 2>/dev/null
