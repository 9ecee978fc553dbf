#!/bin/bash
# systemd.sh - runs as a unit of the host of run-systemd.sh, once at each of its two boots. Its first mistake ends both.
set -eu
trap 'wrong "line $LINENO"' ERR
wrong() { trap - ERR; echo "FAIL $1"; systemctl --no-pager status 'freestone*' srv-data.mount tmp.mount || true; journalctl -b --no-pager | tail -n 60; systemctl poweroff; exit 1; }
soon() { # seconds command...
  for _ in $(seq "$1"); do "${@:2}" >/dev/null 2>&1 && return; sleep 1; done; return 1; }
settled() { [ "$(systemctl is-system-running)" != starting ]; }
absent() { [ ! -e "$1" ]; }
is() { # WHAT WANTED FOUND
  [ "$2" = "$3" ] || wrong "$1: wanted '$2', found '$3'"; }
line() { journalctl -b -1 -o cat --no-pager | grep -n "$1" | tail -n 1 | cut -d: -f1; } # of the last boot's journal
export FREESTONE_CONTROL=/run/freestone/control.sock

soon 600 settled || wrong "the boot does not end"
is "units that failed" "" "$(systemctl --no-legend --plain --state=failed list-units | cut -d' ' -f1 | tr '\n' ' ')"
is "the system" running "$(systemctl is-system-running || true)"
is "the mount" active "$(systemctl is-active srv-data.mount)"
disk=$(readlink -f /dev/freestone/data); [ -b "$disk" ] || wrong "no /dev/freestone/data"
is "what is mounted" "$disk" "$(findmnt -n -o SOURCE /srv/data)"

is "/tmp" "$(readlink -f /dev/freestone/tmp) ext4 1777" "$(findmnt -n -o SOURCE,FSTYPE /tmp | tr -s ' ') $(stat -c %a /tmp)"
is "what was in /tmp" "" "$(find /tmp -name 'lab.*')"
is "/srv/build" "$(readlink -f /dev/freestone/build)" "$(findmnt -n -o SOURCE /srv/build)"
is "/srv/scratch" /dev/nbd0 "$(findmnt -n -o SOURCE /srv/scratch)"
# The server of user freestone: its rights, its socket, and what the kernel's NBD client reads through it.
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
  [ "$left" -lt $((data / 2)) ] || wrong "what is removed from /tmp stays in memory: $left of $data bytes"
  echo "ok   /tmp is on a compressed RAM disk: $data bytes in $stored, $left when they are removed"
  echo stays >/tmp/lab.boot; echo built >/srv/build/made; echo kept >/srv/scratch/kept; sync
  for unit in 'freestone-mkfs@tmp.service' 'freestone-mkfs@build.service'; do is "$unit" success "$(systemctl show -P Result "$unit")"; done
  echo "ok   $(uname -r), $(systemctl --version | head -n 1): a new file system on /dev/freestone/data is mounted"
  other=$(freestone publish job-7 --ublk)
  soon 60 test -e /dev/freestone/job-7 || wrong "no /dev/freestone/job-7"
  is "job-7" "$other" "$(readlink -f /dev/freestone/job-7)"
  freestone unpublish job-7
  soon 60 absent /dev/freestone/job-7 || wrong "/dev/freestone/job-7 stays"
  echo "ok   a device that is published later has its name, until it is unpublished"
  printf '\n[[device]]\nname = "more"\nkind = "ram"\ndisksize = "1M"\n' >>/etc/freestone.toml
  systemctl reload freestone.service || wrong "the reload fails"
  soon 60 test -e /dev/freestone/more || wrong "no /dev/freestone/more after the reload"
  is "after the reload, the mount" active "$(systemctl is-active srv-data.mount)"
  is "after the reload, data" "$disk" "$(readlink -f /dev/freestone/data)"
  echo "ok   a reload brings in what the file says, and leaves what is there"
  own_server
  dd if=/usr/bin/bash of=/dev/nbd2 bs=64k count=8 oflag=direct conv=fsync 2>/dev/null || wrong "freestone-server takes no write"
  nbd-client -d /dev/nbd2 >/dev/null
  printf '\n[[device]]\nname = "more"\nkind = "ram"\ndisksize = "1M"\n' >>/etc/freestone-server.toml
  systemctl reload freestone-server.service || wrong "the reload of freestone-server fails"
  has_more() { freestone list --control $served/control.sock | grep -q '^more '; }
  soon 60 has_more || wrong "freestone-server does not have what its file says after the reload"
  systemctl restart freestone-server.service || wrong "freestone-server does not start again"
  has_more || wrong "freestone-server does not have what its file says after a restart"
  systemctl stop freestone-server.service
  is "the end of freestone-server" success "$(systemctl show -P Result freestone-server.service)"
  absent $served || wrong "$served stays"
  systemctl start freestone-server.service || wrong "freestone-server does not start"
  echo "ok   freestone-server serves as user freestone without a capability, is reloaded, restarted and stopped"
  for client in 1 2; do
    nbd-client -unix /run/freestone.sock -name own /dev/nbd1 >/dev/null || wrong "the socket serves no client"
    is "a new disk for each client" 0 "$(dd if=/dev/nbd1 bs=1M count=1 iflag=direct 2>/dev/null | tr -d '\0' | wc -c)"
    dd if=/usr/bin/bash of=/dev/nbd1 bs=64k count=8 oflag=direct 2>/dev/null
    is "what a client of the socket reads" "$(head -c 512K /usr/bin/bash | sha256sum)" "$(head -c 512K /dev/nbd1 | sha256sum)"
    is "servers for clients" 1 "$(systemctl --no-legend --plain list-units 'freestone@*' | wc -l)"
    nbd-client -d /dev/nbd1 >/dev/null
    gone() { [ -z "$(systemctl --no-legend --plain list-units 'freestone@*')" ]; }
    soon 60 gone || wrong "the server of client $client stays when that has gone"
  done
  is "units that failed" "" "$(systemctl --no-legend --plain --state=failed list-units | cut -d' ' -f1 | tr '\n' ' ')"
  echo "ok   the socket starts a server for each client, which ends with it"
  freestone unpublish data 2>/dev/null && wrong "a mounted device is unpublished"
  systemctl stop freestone.service
  is "after the stop, the mount" inactive "$(systemctl is-active srv-data.mount || true)"
  absent "$disk" || wrong "$disk stays"
  is "the server's end" success "$(systemctl show -P Result freestone.service)"
  for unit in srv-scratch.mount srv-build.mount freestone-nbd@scratch.service; do
    is "after the stop, $unit" inactive "$(systemctl is-active $unit || true)"; done
  systemctl start srv-data.mount srv-build.mount srv-scratch.mount
  is "what was written" first "$(cat /srv/data/boot)"
  echo "ok   a stop of the server unmounts first; a mount starts the server"
  is "what the NBD client reads from the server that came back" kept "$(cat /srv/scratch/kept)"
  echo again >/srv/scratch/again
  dmesg | grep -q "I/O error, dev nbd0" && wrong "the NBD client had errors"
  echo "ok   a stop of the server unmounts what the kernel's NBD client shows, too, and it is mounted again"
  systemctl reboot 2>/dev/null # without dbus it says so
  exit
fi
is "a RAM disk's content, kept" 1 "$(freestone stat build --json | grep -c '"generation": 1,')"
is "what was written before the reboot" "first built kept again" "$(cat /srv/data/boot /srv/build/made /srv/scratch/{kept,again} | tr '\n' ' ' | sed 's/ $//')"
own_server
is "what was written to freestone-server before the reboot" "$(head -c 512K /usr/bin/bash | sha256sum)" "$(head -c 512K /dev/nbd2 | sha256sum)"
nbd-client -d /dev/nbd2 >/dev/null
echo "ok   freestone-server has after the reboot what was written before"
unmounted=$(line "Unmounted srv-data.mount"); stopping=$(line "Stopping freestone.service"); ended=$(line "freestone.service: Deactivated successfully")
[ -n "$unmounted" ] && [ -n "$stopping" ] && [ -n "$ended" ] && [ "$unmounted" -lt "$stopping" ] && [ "$stopping" -lt "$ended" ] ||
  wrong "the reboot's order: unmounted $unmounted, stopping $stopping, ended $ended"
journalctl -b -u freestone-mkfs@build.service -o cat --no-pager | grep -q "there is something on it" ||
  wrong "freestone-mkfs does not tell of the file system that was there"
unmounted=$(line "Unmounted tmp.mount"); stopping=$(line "Stopping freestone-tmp.service"); ended=$(line "freestone-tmp.service: Deactivated successfully")
[ -n "$unmounted" ] && [ -n "$stopping" ] && [ -n "$ended" ] && [ "$unmounted" -lt "$stopping" ] && [ "$stopping" -lt "$ended" ] ||
  wrong "the reboot's order of /tmp: unmounted $unmounted, stopping $stopping, ended $ended"
echo "ok   /tmp was unmounted, then its server ended; it is new after the reboot"
[ -z "$(line "timed out")" ] || wrong "the reboot waited: $(journalctl -b -1 -o cat | grep "timed out")"
dmesg | grep -q "EXT4-fs (${disk#/dev/}): recovery complete" && wrong "it was not unmounted cleanly"
echo "ok   a RAM disk that is kept has its content after a stop and after a reboot"
echo "ok   a reboot unmounts, ends the server, and the next boot mounts what was written"
for unit in freestone.service freestone-server.service freestone-tmp.service freestone-mkfs@build.service freestone-nbd@scratch.service freestone@x.service; do
  echo "     $(systemd-analyze security --no-pager $unit | tail -n 1)"
done
echo LAB-EXIT:0
systemctl poweroff 2>/dev/null
