#!/bin/bash
# systemd.sh - runs as a unit of the host of run-systemd.sh, once at each of its two boots. Its first mistake ends both.
set -eu
wrong() { echo "FAIL $1"; systemctl --no-pager status freestone.service srv-data.mount || true; journalctl -b --no-pager | tail -n 60; systemctl poweroff; exit 1; }
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

if [ ! -e /srv/data/boot ]; then
  echo first >/srv/data/boot
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
  freestone unpublish data 2>/dev/null && wrong "a mounted device is unpublished"
  systemctl stop freestone.service
  is "after the stop, the mount" inactive "$(systemctl is-active srv-data.mount || true)"
  absent "$disk" || wrong "$disk stays"
  is "the server's end" success "$(systemctl show -P Result freestone.service)"
  systemctl start srv-data.mount
  is "what was written" first "$(cat /srv/data/boot)"
  echo "ok   a stop of the server unmounts first; a mount starts the server"
  systemctl reboot 2>/dev/null # without dbus it says so
  exit
fi
is "what was written before the reboot" first "$(cat /srv/data/boot)"
unmounted=$(line "Unmounted srv-data.mount"); stopping=$(line "Stopping freestone.service"); ended=$(line "freestone.service: Deactivated successfully")
[ -n "$unmounted" ] && [ -n "$stopping" ] && [ -n "$ended" ] && [ "$unmounted" -lt "$stopping" ] && [ "$stopping" -lt "$ended" ] ||
  wrong "the reboot's order: unmounted $unmounted, stopping $stopping, ended $ended"
[ -z "$(line "timed out")" ] || wrong "the reboot waited: $(journalctl -b -1 -o cat | grep "timed out")"
dmesg | grep -q "EXT4-fs (${disk#/dev/}): recovery complete" && wrong "it was not unmounted cleanly"
echo "ok   a reboot unmounts, ends the server, and the next boot mounts what was written"
echo "     $(systemd-analyze security --no-pager freestone.service | tail -n 1)"
echo LAB-EXIT:0
systemctl poweroff 2>/dev/null
